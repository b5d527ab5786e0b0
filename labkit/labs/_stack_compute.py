"""What `stack_lab` measures: a set of rungs in turn with the baseline, its bytes, its ceiling, its perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from labkit.engine.decode import Decoder
from labkit.engine.ladder import RUNGS, Stack, WeightForm
from labkit.hardware import measure_ceilings
from labkit.labs import _stack_steps as steps
from labkit.labs._result import Progress
from labkit.labs._speculative_steps import fastest_threads
from labkit.labs._stack_models import Stacks
from labkit.labs._stack_result import Quality, Run, StackParams, StackResult, Turn
from labkit.speculative.stats import SpeculativeStats

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | StackResult]

# A first look, and each of the turns after it.
_FIRST_TOKENS, _TURN_TOKENS = 12, 24
# Baseline and set alternate for about so long.
_BUDGET_S, _FEWEST_TURNS, _MOST_TURNS = 3.0, 2, 5
# A step this much faster than the ceiling allows shows that the ceiling stands too low.
_BEATEN = 1.05


class StackCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and StackResult, each fuller than the one
    before: bytes, a first look, turns with the baseline, the peak, the ceiling, perplexity window by window.

    What the baseline gives for a prompt, and a window's perplexity under a form of weights and cache, is measured once
    and kept; the speed of both is measured again in every setting's turns.
    """

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks
        self._kept: dict[str, Run] = {}
        self._peaks: dict[tuple[object, ...], int] = {}
        self._perplexities: dict[tuple[object, ...], float] = {}
        self._threads: int | None = None
        self._bandwidth = 0.0
        self._second_looks = 2

    def __call__(self, params: StackParams, cancelled: Cancelled) -> Steps:
        before = torch.get_num_threads()
        try:
            yield from self._stages(params, cancelled)
        finally:
            torch.set_num_threads(before)

    def _stages(self, params: StackParams, cancelled: Cancelled) -> Steps:
        left_out = self._stacks.refused(params.rungs)
        on = tuple(rung for rung in params.rungs if rung not in left_out)
        yield from self._prepare(on, cancelled)
        if cancelled():
            return
        stack = self._stacks.stack(on, params.num_assistant_tokens)
        found = steps.start(self._stacks, stack, params, left_out, _TURN_TOKENS)
        yield found
        for stage in (self._look, self._turns, self._peak, self._ceiling, self._quality):
            for step in stage(stack, found, cancelled):
                found = step if isinstance(step, StackResult) else found
                yield step
            if cancelled():
                return

    def _prepare(self, on: tuple[str, ...], cancelled: Cancelled) -> Iterator[Progress]:
        """The model, its texts and the thread count once; the weights of this set where they are new."""
        stacks = self._stacks
        if not stacks.ready:
            name = stacks.given if isinstance(stacks.given, str) else stacks.given.name
            yield Progress(f"Loading {name} (once)", 0.02)
            _ = stacks.models, stacks.texts
        most = torch.get_num_threads()
        if stacks.device.type == "cpu" and not cancelled():
            if self._threads is None:
                yield Progress("Which thread count is fastest (once)", 0.04)
                # The baseline's own weights choose: what everything is compared with is not held back.
                found = fastest_threads(Decoder(stacks.loaded.model), tuple(sorted({1, most})), cancelled)
                self._threads = None if cancelled() else found
            torch.set_num_threads(self._threads or most)
        form = WeightForm.of(on, stacks.dtype)
        if not stacks.models.has(form) and not cancelled():
            made = [RUNGS[rung].title for rung in on if rung in steps.WEIGHTS]
            yield Progress(f"Making the weights: {', '.join(made) or 'as they are'} (once)", 0.06)
            stacks.models.model(form)

    def _look(self, stack: Stack, found: StackResult, cancelled: Cancelled) -> Steps:
        """A short generation of the set; the baseline's once for a prompt."""
        prompt = found.params.prompt
        input_ids = self._stacks.texts.prompts[prompt]
        yield Progress("A first look", 0.1)
        steps.warm(stack, input_ids)
        run, _ = steps.clocked(stack, input_ids, _FIRST_TOKENS)
        found = replace(found, first=run, kept=self._kept.get(prompt))
        yield found
        if found.kept is None and not cancelled():
            yield Progress("The baseline, for this prompt (once)", 0.15)
            steps.warm(self._stacks.baseline, input_ids)
            self._kept[prompt], _ = steps.clocked(self._stacks.baseline, input_ids, _FIRST_TOKENS)
            yield replace(found, kept=self._kept[prompt])

    def _turns(self, stack: Stack, found: StackResult, cancelled: Cancelled) -> Steps:
        """Baseline and set one after the other, each turn a sample of their ratio."""
        input_ids, spent = self._stacks.texts.prompts[found.params.prompt], 0.0
        for i in range(_MOST_TURNS):
            if cancelled() or (i >= _FEWEST_TURNS and spent > _BUDGET_S):
                return
            yield Progress(f"The baseline and this set in turn, turn {i + 1}", 0.2 + 0.08 * i)
            base, _ = steps.clocked(self._stacks.baseline, input_ids, _TURN_TOKENS)
            if cancelled():
                return
            run, stats = steps.clocked(stack, input_ids, _TURN_TOKENS)
            spent += sum(one.ttft_s + (_TURN_TOKENS - 1) * one.tpot_s for one in (base, run))
            stats = found.stats + (stats or SpeculativeStats())
            found = replace(found, turns=(*found.turns, Turn(base, run)), stats=stats)
            yield found

    def _peak(self, stack: Stack, found: StackResult, cancelled: Cancelled) -> Steps:
        """The highest that memory stands, once for a set and a prompt: it comes out the same each time."""
        for name, one in (("base_sizes", self._stacks.baseline), ("sizes", stack)):
            key = (one.rungs, one.gamma, found.params.prompt)
            if key not in self._peaks:
                if cancelled():
                    return
                yield Progress("Memory at its highest", 0.6)
                input_ids = self._stacks.texts.prompts[found.params.prompt]
                self._peaks[key] = one.peak_bytes(input_ids, max_new_tokens=_TURN_TOKENS)
            found = replace(found, **{name: replace(getattr(found, name), peak_bytes=self._peaks[key])})
        yield found

    def _ceiling(self, stack: Stack, found: StackResult, cancelled: Cancelled) -> Steps:
        if not self._bandwidth:
            yield Progress("Measuring this machine's memory bandwidth (about 2 s, once)", 0.7)
            self._raise_bandwidth()
        found = replace(found, bandwidth=self._bandwidth)
        beaten = 1 / found.stack.median > _BEATEN * found.ceiling
        if beaten and self._second_looks and not cancelled():
            self._second_looks -= 1
            yield Progress("A step beat the bandwidth, which was measured too low: measuring it again", 0.75)
            self._raise_bandwidth(refresh=True)
        yield replace(found, bandwidth=self._bandwidth)

    def _raise_bandwidth(self, refresh: bool = False) -> None:
        """The highest so far: what a busy neighbour took away was there all the same."""
        measured = measure_ceilings(self._stacks.device, refresh=refresh).read_bandwidth
        self._bandwidth = max(self._bandwidth, measured)

    def _quality(self, stack: Stack, found: StackResult, cancelled: Cancelled) -> Steps:
        """Perplexity of set and baseline, window by window."""
        windows, mine, theirs = self._stacks.texts.evaluation, (), ()
        count, length = windows.shape
        for i in range(count):
            yield Progress(f"Perplexity: window {i + 1} of {count}", 0.8 + 0.2 * i / count)
            for one in (self._stacks.baseline, stack):
                if cancelled():
                    return
                key = (*one.quality_key, i)
                if key not in self._perplexities:
                    self._perplexities[key] = one.perplexity(windows[i], length)
            theirs = (*theirs, self._perplexities[*self._stacks.baseline.quality_key, i])
            mine = (*mine, self._perplexities[*stack.quality_key, i])
            yield replace(found, quality=Quality(mine, theirs, length, count))
