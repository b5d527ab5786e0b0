"""The steps that `speculative_lab` runs: a generation that is watched as it goes, one that is clocked, the choice of a
thread count. No widgets here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.engine.decode import Decoder
from labkit.engine.sampling import seeded_generator
from labkit.measure import synchronize
from labkit.speculative.decode import SpeculativeOutput, generate
from labkit.speculative.interface import Proposer, Sampling
from labkit.speculative.loop import SpeculativeLoop
from labkit.speculative.stats import Call, SpeculativeStats

Cancelled = Callable[[], bool]
# A step is clocked so many times with each thread count.
_STEPS = 7
# Drawing takes some 50 ms: oftener would take longer than the calls.
_SHOWN_EVERY_S = 0.15


class Stopped(Exception):
    """A newer setting has come: what is generated now is of no use."""


@dataclass(frozen=True)
class Job:
    """One generation as the setting asks for it, whoever drafts."""

    decoder: Decoder
    input_ids: Tensor
    proposer: Proposer
    num_assistant_tokens: int
    temperature: float
    max_new_tokens: int
    eos_token_id: int | None

    def speculate(self, seed: int, watch: Callable[[Call], None]) -> SpeculativeOutput:
        """With the draft."""
        return generate(
            self.decoder,
            self.input_ids,
            self.proposer,
            num_assistant_tokens=self.num_assistant_tokens,
            watch=watch,
            seed=seed,
            **self._common,
        )

    def decode(self, seed: int, cancelled: Cancelled) -> float:
        """Without one: seconds a token after the first. Raises Stopped when cancelled in between."""
        stopper = _Stopper(cancelled)
        return self.decoder.generate(self.input_ids, seed=seed, streamer=stopper, **self._common).tpot_s

    def loop(self, seed: int, watch: Callable[[Call], None]) -> SpeculativeLoop:
        """The same, to be taken call by call."""
        device = self.decoder.device
        return SpeculativeLoop(
            self.decoder,
            self.proposer,
            Sampling(self.temperature),
            seeded_generator(device, seed),
            self.num_assistant_tokens,
            self.input_ids.shape[1] + self.max_new_tokens,
            frozenset(() if self.eos_token_id is None else (self.eos_token_id,)),
            None,
            watch,
        )

    @property
    def _common(self) -> dict[str, object]:
        names = ("max_new_tokens", "temperature", "eos_token_id")
        return {name: getattr(self, name) for name in names}


class _Stopper:
    """A streamer that looks, token by token, whether to go on."""

    def __init__(self, cancelled: Cancelled) -> None:
        self._cancelled = cancelled

    def put(self, tokens: Tensor) -> None:
        if self._cancelled():
            raise Stopped

    def end(self) -> None:
        pass


def clocked(job: Job, seed: int, cancelled: Cancelled) -> SpeculativeOutput:
    """A speculative generation that nobody looks at. Raises Stopped when cancelled in between."""

    def watch(call: Call) -> None:
        if cancelled():
            raise Stopped

    return job.speculate(seed, watch)


def streamed(job: Job, seed: int, cancelled: Cancelled) -> Iterator[list[Call] | SpeculativeStats]:
    """The calls of a generation as they are made, those since the last time at once, and at its end what was counted.

    The loop of `generate`, a call at a time, in the thread of the lab: the device's lock is this thread's, and an op
    that clocks itself at its first call would wait for it in another for ever. What is drawn between two calls slows
    them down, so their times are not used. Ends early when cancelled.
    """
    made: list[Call] = []
    loop = job.loop(seed, made.append)
    with torch.inference_mode():
        loop.read_prompt(job.input_ids)
    shown = time.perf_counter()
    while any(loop.running) and not cancelled():
        with torch.inference_mode():  # never over a yield: whoever draws is no part of it
            loop.call()
        if time.perf_counter() - shown >= _SHOWN_EVERY_S or not any(loop.running):
            yield made.copy()
            made.clear()
            shown = time.perf_counter()
    if not any(loop.running):
        yield loop.stats


def fastest_threads(decoder: Decoder, candidates: tuple[int, ...], cancelled: Cancelled) -> int:
    """Which of these CPU thread counts a decode step runs fastest with, here and in this thread; it is set.

    A lab measures in a thread of its own, which has OpenMP threads of its own. With those of the main thread they are
    more than the cores, and then the runtime puts each to sleep as soon as it waits: at every one of the hundreds of
    small parallel calls of a step one thread wakes another, and one thread alone is faster. A product of libgomp:
    GOMP_SPINCOUNT, in its manual.
    """
    decoder.fill_cache(1, 128)
    token = torch.ones(1, 1, dtype=torch.int64, device=decoder.device)
    times: dict[int, list[float]] = {count: [] for count in candidates}
    for i in range(_STEPS + 1):
        for count, seconds in times.items():
            if cancelled():
                break
            torch.set_num_threads(count)
            decoder.forward(token, logits_to_keep=1)  # wakes the threads
            begin = time.perf_counter()
            decoder.forward(token, logits_to_keep=1)
            synchronize(decoder.device)
            if i:
                seconds.append(time.perf_counter() - begin)
            decoder.crop(128)
    found = {count: statistics.median(seconds) for count, seconds in times.items() if seconds}
    best = min(found, key=found.get) if found else candidates[-1]
    torch.set_num_threads(best)
    return best
