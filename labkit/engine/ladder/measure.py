"""`measure_ladder`: every prefix of a list of rungs, all of them in turns, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import say
from labkit.engine.ladder.result import Ladder, LadderStep, title_of
from labkit.engine.ladder.rungs import RUNGS, check_rungs, refusals
from labkit.engine.ladder.stack import Stack, StackRun
from labkit.engine.ladder.weights import StackModels
from labkit.measure import Timing, device_lock
from labkit.models import LoadedModel
from labkit.speculative.interface import Proposer
from labkit.speculative.stats import SpeculativeStats


def measure_ladder(
    model: LoadedModel | PreTrainedModel | StackModels,
    rungs: Iterable[str] = tuple(RUNGS),
    *,
    prompts: Sequence[torch.Tensor],
    proposer: Proposer | None = None,
    num_assistant_tokens: int = 2,
    also: Mapping[str, Iterable[str]] | None = None,
    max_new_tokens: int = 64,
    repeats: int = 3,
    eval_ids: torch.Tensor | None = None,
    context_length: int = 512,
    read_bandwidth: float | None = None,
    tell: Callable[[str], None] = say,
) -> Ladder:
    """Put `rungs` on one after another and measure each prefix of them that goes together; those that do not are left
    out with their reason, and the next is put on without them.

    prompts `(1, n)`: each stack continues each by exactly `max_new_tokens`, greedily, `repeats` times, all stacks in
    turns; a first token's and a further token's time are those of a prompt on average, with the spread over turns.
    also: other sets of rungs to measure in the same turns, by what they are called. eval_ids: windows of
    `context_length` tokens for the perplexity; None leaves it out. read_bandwidth in bytes/s: for the ceiling.
    Holds the device's lock. Errors: ValueError for rungs, as `refusals` where a set of `also` does not go together.
    """
    models = model if isinstance(model, StackModels) else StackModels(model)
    rungs = check_rungs("rungs", rungs)
    _check.require(bool(len(prompts)), "prompts", prompts, "at least one prompt of shape (1, n)")
    _check.integer("repeats", repeats, 1)
    options = {"proposer": proposer, "num_assistant_tokens": num_assistant_tokens}
    plan = _planned(models, rungs, proposer is not None)
    stacks = {step.rungs: Stack(models, step.rungs, **options) for step in plan if not step.refused}
    others = {title: check_rungs("also", names) for title, names in (also or {}).items()}
    stacks |= {names: Stack(models, names, **options) for names in others.values() if names not in stacks}
    with device_lock(models.device):
        runs = _in_turns(stacks, prompts, max_new_tokens, repeats, tell)
        found = {}
        for names, stack in stacks.items():
            tell(f"memory and quality: {', '.join(names) or 'baseline'}")
            step = _timed(LadderStep("", names), runs[names])
            step = _weighed(step, stack, prompts, max_new_tokens, read_bandwidth)
            quality = None if eval_ids is None else _quality(stack, eval_ids, context_length, found)
            found[names] = replace(step, perplexity=quality)
    steps = tuple(step if step.refused else replace(found[step.rungs], title=step.title) for step in plan)
    beside = tuple(replace(found[names], title=title) for title, names in others.items())
    return Ladder(models.name, steps, beside, prompts[0].shape[1], max_new_tokens)


def _planned(models: StackModels, rungs: tuple[str, ...], has_proposer: bool) -> list[LadderStep]:
    """The baseline and a step a rung, those that are refused with their reason."""
    dtype = models.loaded.dtype
    refused = refusals(rungs, device=models.device, dtype=dtype, has_proposer=has_proposer)
    baseline = f"transformers.generate, {str(dtype).removeprefix('torch.')}, eager attention"
    steps, on = [LadderStep(baseline, ())], ()
    for rung in rungs:
        if rung in refused:
            steps.append(LadderStep(RUNGS[rung].title, (*on, rung), refused=refused[rung]))
            continue
        on = (*on, rung)
        steps.append(LadderStep(title_of(on, baseline), on))
    return steps


Turns = list[list[StackRun]]


def _in_turns(
    stacks: Mapping[tuple[str, ...], Stack],
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    repeats: int,
    tell: Callable[[str], None],
) -> dict[tuple[str, ...], Turns]:
    """A run for each prompt and turn, after one that warms up."""
    runs: dict[tuple[str, ...], Turns] = {names: [] for names in stacks}
    for names, stack in stacks.items():
        tell(f"warming up: {', '.join(names) or 'baseline'}")
        stack.generate(prompts[0], max_new_tokens=new_tokens)
    for turn in range(repeats):
        tell(f"turn {turn + 1} of {repeats}, {len(stacks)} stacks")
        for names in stacks:
            runs[names].append([])
        for prompt in prompts:
            for names, stack in stacks.items():
                runs[names][-1].append(stack.generate(prompt, max_new_tokens=new_tokens))
    return runs


def _timed(step: LadderStep, turns: Turns) -> LadderStep:
    """With the times of its turns, each the mean over the prompts, and what speculation counted."""
    ttft = Timing.of([fmean(run.ttft_s for run in turn) for turn in turns])
    tpot = Timing.of([fmean(run.tpot_s for run in turn) for turn in turns])
    counted = [run.stats for run in turns[0] if run.stats is not None]
    if not counted:
        return replace(step, ttft=ttft, tpot=tpot)
    stats = sum(counted, SpeculativeStats())
    acceptance = stats.acceptance_rate if stats.n_tested else None
    return replace(step, ttft=ttft, tpot=tpot, tokens_per_call=stats.tokens_per_target_call, acceptance=acceptance)


def _weighed(
    step: LadderStep, stack: Stack, prompts: Sequence[torch.Tensor], new_tokens: int, bandwidth: float | None
) -> LadderStep:
    """With its bytes, and the ceiling that they set."""
    step_bytes = stack.step_bytes(prompts[0].shape[1] + new_tokens // 2)
    ceiling = None if bandwidth is None else step.tokens_per_call * bandwidth / step_bytes
    # The cache is allocated for the whole length at the first token; two show all that there is.
    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    peak = stack.peak_bytes(longest, max_new_tokens=2)
    sizes = {"weight_bytes": stack.weight_bytes, "step_bytes": step_bytes, "kv_bytes": stack.kv_bytes}
    return replace(step, peak_bytes=peak, ceiling=ceiling, **sizes)


def _quality(stack: Stack, eval_ids: torch.Tensor, length: int, known: Mapping[tuple, LadderStep]) -> float:
    """Perplexity, taken over from a stack whose weights and cache are the same."""
    same = {"bfloat16", "int8", "int4", "int8_head", "quantized_kv"}
    kept = (stack.on & same) - ({"int8"} if "int4" in stack.on else set())
    for names, step in known.items():
        on = set(names)
        if (on & same) - ({"int8"} if "int4" in on else set()) == kept:
            return step.perplexity
    return stack.perplexity(eval_ids, length)
