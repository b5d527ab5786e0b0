"""What `speculative_lab` measures: a generation call by call, its speed beside plain decoding, what a call costs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from labkit.labs import _speculative_steps as steps
from labkit.labs._result import Progress
from labkit.labs._speculative_models import Targets
from labkit.labs._speculative_result import MOST_DRAFTED, Round, SpeculativeParams, SpeculativeResult
from labkit.labs._speculative_tokens import tokens_of
from labkit.models import LoadedModel
from labkit.speculative.costs import SpeculationCosts, measure_costs
from labkit.speculative.interface import Proposer, Sampling
from labkit.speculative.prompts import prompt_ids
from labkit.speculative.stats import SpeculativeStats

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | SpeculativeResult]

# Plain and speculative generations alternate for about so long.
_BUDGET_S, _FEWEST_ROUNDS, _MOST_ROUNDS = 2.5, 2, 5
# The chosen length's costs are clocked for so long, those of the others, for the curve, for less.
_RUN_S, _BRIEF_S = 0.15, 0.04


class SpeculativeCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and SpeculativeResult, each fuller than the
    one before: the tokens as they come, speed, costs of a call at the chosen length, those at the others.

    `prompts`: a text by kind. `make`: what drafts at a setting. What a call costs at the other lengths is measured once
    for a target, proposer and prompt; the chosen length's always.
    """

    def __init__(
        self,
        targets: Targets,
        prompts: Mapping[str, str],
        *,
        make: Callable[[SpeculativeParams], Proposer] | None = None,
    ) -> None:
        self._targets, self._prompts = targets, prompts
        self._make = make or targets.proposer
        self._costs: dict[tuple[object, ...], dict[int, SpeculationCosts]] = {}
        self._threads: dict[str, int] = {}

    def __call__(self, params: SpeculativeParams, cancelled: Cancelled) -> Steps:
        before = torch.get_num_threads()
        try:
            yield from self._stages(params, cancelled)
        except steps.Stopped:
            return
        finally:
            torch.set_num_threads(before)

    def _stages(self, params: SpeculativeParams, cancelled: Cancelled) -> Steps:
        yield from self._prepare(params, cancelled)
        if cancelled():
            return
        job, found = self._start(params)
        for stage in (self._watch, self._clock, self._chosen, self._others):
            for step in stage(job, found, cancelled):
                found = step if isinstance(step, SpeculativeResult) else found
                yield step
            if cancelled():
                return

    def _prepare(self, params: SpeculativeParams, cancelled: Cancelled) -> Iterator[Progress]:
        """The target with its thread count, once; the proposer, before anything is measured."""
        if not self._targets.has(params.weights):
            yield Progress(f"Loading {params.model}, {params.weights} weights (once)", 0.02)
            self._targets.decoder(params.weights)
        if params.num_assistant_tokens and not cancelled():
            yield Progress(f"{params.proposer} gets ready", 0.06)
            self._make(params)
        decoder = self._targets.decoder(params.weights)
        if decoder.device.type == "cpu" and not cancelled():
            self._set_threads(params.weights, cancelled)

    def _set_threads(self, weights: str, cancelled: Cancelled) -> None:
        most = torch.get_num_threads()
        if weights not in self._threads:
            count = steps.fastest_threads(self._targets.decoder(weights), tuple(sorted({1, most})), cancelled)
            if not cancelled():
                self._threads[weights] = count
        torch.set_num_threads(self._threads.get(weights, most))

    def _start(self, params: SpeculativeParams) -> tuple[steps.Job, SpeculativeResult]:
        decoder = self._targets.decoder(params.weights)
        loaded, text = self._targets.loaded, self._prompts[params.prompt]
        input_ids = prompt_ids(loaded.tokenizer, text).to(decoder.device)
        job = steps.Job(
            decoder,
            input_ids,
            self._make(params) if params.num_assistant_tokens else _NoDraft(),
            params.num_assistant_tokens,
            params.temperature,
            params.max_new_tokens,
            getattr(loaded.tokenizer, "eos_token_id", None),
        )
        dtype = str(decoder.dtype).removeprefix("torch.")
        threads = torch.get_num_threads() if decoder.device.type == "cpu" else None
        return job, SpeculativeResult(params, str(decoder.device), dtype, text, input_ids.shape[1], threads)

    def _watch(self, job: steps.Job, found: SpeculativeResult, cancelled: Cancelled) -> Steps:
        """The tokens as they come."""
        yield Progress("Drafting and verifying; the tokens as they come", 0.1)
        decode = functools.partial(decode_token, self._targets.loaded)
        with contextlib.closing(steps.streamed(job, 0, cancelled)) as stream:
            for step in stream:
                if isinstance(step, SpeculativeStats):
                    found = replace(found, stats=step)
                else:
                    found = _longer(found, step, decode)
                yield found

    def _clock(self, job: steps.Job, found: SpeculativeResult, cancelled: Cancelled) -> Steps:
        """Plain decoding and speculation in turn, each round a sample of the ratio."""
        begin = time.perf_counter()
        for i in range(_MOST_ROUNDS):
            if i >= _FEWEST_ROUNDS and time.perf_counter() - begin > _BUDGET_S:
                return
            yield Progress(f"Plain decoding and speculation in turn, round {i + 1}", 0.25 + 0.05 * i)
            # Sampled, each round is another text: what is kept of a draft hangs on it.
            plain = job.decode(i, cancelled)
            output = steps.clocked(job, i, cancelled)
            if plain > 0 and output.tpot_s > 0:
                found = replace(found, rounds=(*found.rounds, Round(plain, output.tpot_s)))
            found = replace(found, stats=found.stats + output.stats)
            yield found

    def _chosen(self, job: steps.Job, found: SpeculativeResult, cancelled: Cancelled) -> Steps:
        """What a call costs at the chosen length."""
        gamma = job.num_assistant_tokens
        if gamma:
            yield Progress("What drafting and verifying cost", 0.6)
            known = self._costs.setdefault(self._key(found.params), {})
            known[gamma] = self._measure(job, gamma, _RUN_S)
            yield replace(found, costs=dict(sorted(known.items())))

    def _others(self, job: steps.Job, found: SpeculativeResult, cancelled: Cancelled) -> Steps:
        """The same at every other length, for the curve; what is known already is not measured again."""
        if not job.num_assistant_tokens:
            return
        known = self._costs[self._key(found.params)]
        missing = [gamma for gamma in range(1, MOST_DRAFTED + 1) if gamma not in known]
        for i, gamma in enumerate(missing):
            yield Progress(f"The same for {gamma} drafted, for the curve", 0.65 + 0.35 * i / len(missing))
            if cancelled():
                return
            at = replace(found.params, num_assistant_tokens=gamma)
            known[gamma] = self._measure(replace(job, proposer=self._make(at)), gamma, _BRIEF_S)
        yield replace(found, costs=dict(sorted(known.items())))

    def _measure(self, job: steps.Job, gamma: int, seconds: float) -> SpeculationCosts:
        sampling = Sampling(job.temperature)
        return measure_costs(job.decoder, job.proposer, job.input_ids, gamma, sampling=sampling, min_run_s=seconds)

    def _key(self, params: SpeculativeParams) -> tuple[object, ...]:
        return (*params.same_but_length, torch.get_num_threads())


class _NoDraft:
    """Stands where nothing is drafted."""

    wants_hidden = False

    def begin(self, *_: object) -> None:
        pass

    def propose(self, rows: list[list[int]], n: int) -> None:
        raise AssertionError("asked for a draft of 0 tokens")

    def observe(self, *_: object) -> None:
        pass


def _longer(found: SpeculativeResult, calls: list, decode: Callable[[int], str]) -> SpeculativeResult:
    """With these calls."""
    first, tree = len(found.calls), found.params.tree
    new = [token for i, call in enumerate(calls, first) for token in tokens_of(call, i, decode, tree)]
    return replace(found, calls=(*found.calls, *calls), tokens=(*found.tokens, *new))


def decode_token(loaded: LoadedModel, token: int) -> str:
    """The text of one token; what is no text on its own, such as half a character, comes as a replacement character."""
    return loaded.tokenizer.decode([token], clean_up_tokenization_spaces=False)
