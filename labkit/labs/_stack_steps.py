"""The steps that `stack_lab` runs: what is known before a setting is measured, and one generation that is clocked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from labkit.engine.ladder import Stack, recorded_ladders
from labkit.engine.ladder.rungs import effective
from labkit.labs._stack_models import Stacks
from labkit.labs._stack_result import Recorded, Run, Sizes, StackParams, StackResult
from labkit.speculative.stats import SpeculativeStats

# The rungs that change the weights.
WEIGHTS = ("bfloat16", "int8", "int4", "int8_head")
# What a first call makes once for all shows in the first two tokens after a few.
_WARM_PROMPT, _WARM_TOKENS = 8, 2


def sizes_of(stack: Stack, kv_len: int) -> Sizes:
    """In bytes, the peak not yet."""
    return Sizes(stack.weight_bytes, stack.kv_bytes, stack.step_bytes(kv_len))


def start(
    stacks: Stacks, stack: Stack, params: StackParams, left_out: Mapping[str, str], new_tokens: int
) -> StackResult:
    """What is known without a clock."""
    prompt_tokens = stacks.texts.prompts[params.prompt].shape[1]
    middle = prompt_tokens + new_tokens // 2
    dtype = str(stack.dtype).removeprefix("torch.")
    base = str(stacks.baseline.dtype).removeprefix("torch.")
    return StackResult(
        params=params,
        device=str(stacks.device),
        dtype=dtype,
        on=stack.rungs,
        left_out=dict(left_out),
        prompt_tokens=prompt_tokens,
        baseline_name=f"transformers.generate, {base}, eager attention",
        sizes=sizes_of(stack, middle),
        base_sizes=sizes_of(stacks.baseline, middle),
        proposer=stacks.proposer_name if "speculation" in stack.on else "",
        threads=torch.get_num_threads() if stacks.device.type == "cpu" else None,
        recorded=recorded(params.model, stacks.device, stack.rungs, stack.gamma),
    )


def recorded(model: str, device: torch.device, on: tuple[str, ...], gamma: int) -> Recorded | None:
    """The same rungs, and as long a draft, in the ladder that is kept for this model and kind of device, if it has
    them."""
    ladder = recorded_ladders().get(f"{model}, {device.type}")
    if not ladder or not on or ("speculation" in on and ladder.where.get("num_assistant_tokens") != gamma):
        return None
    for step in (*ladder.measured(), *ladder.also):
        if set(effective(step.rungs)) == set(effective(on)):
            said = [str(ladder.where[name]) for name in ("date", "machine", "weights") if name in ladder.where]
            return Recorded(ladder.speedup(step), ", ".join([*said, f"{ladder.prompt_tokens} prompt tokens"]))
    return None


def warm(stack: Stack, input_ids: torch.Tensor) -> None:
    """What the first call of a stack makes once for all."""
    stack.generate(input_ids[:, :_WARM_PROMPT], max_new_tokens=_WARM_TOKENS)


def clocked(stack: Stack, input_ids: torch.Tensor, new_tokens: int) -> tuple[Run, SpeculativeStats | None]:
    """One generation of exactly so many tokens."""
    out = stack.generate(input_ids, max_new_tokens=new_tokens)
    return Run(out.ttft_s, out.tpot_s), out.stats
