"""`measure_ladder`: every prefix of a list of rungs, all of them in turns, in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import say
from labkit.engine.arguments import check_tokens
from labkit.engine.ladder.result import Ladder, LadderStep, title_of
from labkit.engine.ladder.rungs import RUNGS, check_rungs, refusals
from labkit.engine.ladder.stack import Stack, StackRun
from labkit.engine.ladder.weights import StackModels
from labkit.measure import Timing, device_lock
from labkit.models import LoadedModel
from labkit.quality import checked_windows
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
    on_step: Callable[[LadderStep], None] = lambda step: None,
) -> Ladder:
    """Put `rungs` on one after another and measure each prefix of them that goes together; those that do not are left
    out with their reason, and the next is put on without them.

    prompts `(1, n)`: each stack continues each by exactly `max_new_tokens`, greedily, `repeats` times, all stacks in
    turns; a first token's and a further token's time are those of a prompt on average, with the spread over turns.
    also: other sets of rungs to measure in the same turns, by what they are called. eval_ids: windows of
    `context_length` tokens for the perplexity; None leaves it out. read_bandwidth in bytes/s: for the ceiling. on_step
    is told each step as its figures are complete.
    Holds the device's lock. Errors: ValueError for rungs, as `refusals` where a set of `also` does not go together.
    """
    models = model if isinstance(model, StackModels) else StackModels(model)
    rungs = check_rungs("rungs", rungs)
    several = isinstance(prompts, Sequence) and bool(prompts)
    _check.require(several, "prompts", prompts, "a list of at least one prompt of shape (1, n)")
    for place, prompt in enumerate(prompts):
        check_tokens(f"prompts[{place}]", prompt, models.loaded.config.vocab_size, models.device)
        _check.require(len(prompt) == 1, f"prompts[{place}]", f"shape {tuple(prompt.shape)}", "one row")
    # One token alone has no time a token.
    room = models.loaded.config.max_position_embeddings - max(prompt.shape[1] for prompt in prompts)
    _check.integer("max_new_tokens", max_new_tokens, 2, max(2, room))
    if read_bandwidth is not None:
        _check.require(_check.number("read_bandwidth", read_bandwidth) > 0, "read_bandwidth", read_bandwidth, "above 0")
    if eval_ids is not None:
        checked_windows(models.loaded, eval_ids, context_length)
    _check.integer("repeats", repeats, 1)
    options = {"proposer": proposer, "num_assistant_tokens": num_assistant_tokens}
    plan = _planned(models, rungs, proposer is not None)
    stacks = {step.rungs: Stack(models, step.rungs, **options) for step in plan if not step.refused}
    _check.require(also is None or isinstance(also, Mapping), "also", also, "rungs by title, or None")
    others = {title: check_rungs("also", names) for title, names in (also or {}).items()}
    for title in others:
        _check.require(title not in RUNGS, "also", title, "titles that are not the names of rungs")
    stacks |= {names: Stack(models, names, **options) for names in others.values() if names not in stacks}
    with device_lock(models.device):
        runs = _in_turns(stacks, prompts, max_new_tokens, repeats, tell)
        found, quality = {}, {}
        for names, stack in stacks.items():
            tell(f"memory and quality: {', '.join(names) or 'baseline'}")
            step = _timed(LadderStep(title_of(names, _baseline(models)), names), runs[names])
            step = _weighed(step, stack, prompts, max_new_tokens, read_bandwidth)
            if eval_ids is not None:
                if stack.quality_key not in quality:
                    quality[stack.quality_key] = stack.perplexity(eval_ids, context_length)
                step = replace(step, perplexity=quality[stack.quality_key])
            found[names] = step
            on_step(step)
    steps = tuple(step if step.refused else replace(found[step.rungs], title=step.title) for step in plan)
    beside = tuple(replace(found[names], title=title) for title, names in others.items())
    return Ladder(models.name, steps, beside, _mean_length(prompts), max_new_tokens)


def _mean_length(prompts: Sequence[torch.Tensor]) -> int:
    return round(fmean(prompt.shape[1] for prompt in prompts))


def _baseline(models: StackModels) -> str:
    return f"transformers.generate, {str(models.loaded.dtype).removeprefix('torch.')}, eager attention"


def _planned(models: StackModels, rungs: tuple[str, ...], has_proposer: bool) -> list[LadderStep]:
    """The baseline and a step a rung, those that are refused with their reason."""
    dtype = models.loaded.dtype
    refused = refusals(rungs, device=models.device, dtype=dtype, has_proposer=has_proposer)
    baseline = _baseline(models)
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
    step_bytes = stack.step_bytes(_mean_length(prompts) + new_tokens // 2)
    ceiling = None if bandwidth is None else step.tokens_per_call * bandwidth / step_bytes
    longest = max(prompts, key=lambda prompt: prompt.shape[1])
    peak = stack.peak_bytes(longest, max_new_tokens=new_tokens)
    sizes = {"weight_bytes": stack.weight_bytes, "step_bytes": step_bytes, "kv_bytes": stack.kv_bytes}
    return replace(step, peak_bytes=peak, ceiling=ceiling, **sizes)
