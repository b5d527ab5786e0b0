"""What `paging_lab` measures: the kept arrivals in reserved memory, then through a block manager. No widgets here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

from labkit.kv_cache.trace import Request, Sample, load_trace, replay, tables_at
from labkit.labs._paging_result import TABLES_AT_S, PagingParams, PagingResult, Replay
from labkit.labs._result import Progress

Cancelled = Callable[[], bool]

# A replay that takes longer is shown as far as it has come.
_SHOW_EVERY_S = 0.6


def requests(trace: Sequence[Request], params: PagingParams) -> tuple[Request, ...]:
    """The trace with the system prompt before every prompt."""
    more = params.shared_prefix
    return tuple(dataclasses.replace(r, prompt_tokens=r.prompt_tokens + more) for r in trace)


def paged_options(params: PagingParams) -> dict[str, object]:
    """What `replay`, `summarize` and `tables_at` take for this setting's blocks."""
    return {
        "block_size": params.block_size,
        "num_blocks": params.slots // params.block_size,
        "tokens_per_second": params.tokens_per_second,
        "shared_prefix": params.shared_prefix,
    }


def reserved_options(params: PagingParams) -> dict[str, object]:
    """What `replay` and `summarize` take for memory of the same size, reserved in one piece for each request."""
    return {
        "policy": "max_new",
        "block_size": 1,
        "num_blocks": params.slots,
        "max_length": params.max_length,
        "max_new": min(params.max_new, params.max_length),
        "tokens_per_second": params.tokens_per_second,
    }


def _grow(steps: Iterator[Sample], cancelled: Cancelled) -> Iterator[Replay]:
    """The replay as far as it has come, now and then; last of all the whole. Less where it is cancelled."""
    samples, shown = [], time.perf_counter()
    for sample in steps:
        if cancelled():
            return
        samples.append(sample)
        if time.perf_counter() - shown > _SHOW_EVERY_S:
            yield Replay.of(samples)
            shown = time.perf_counter()
    yield Replay.of(samples)


class PagingCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and PagingResult; the last has the tables.

    `trace` is the kept one unless another is given.
    """

    def __init__(self, trace: Sequence[Request] | None = None) -> None:
        self._trace = tuple(load_trace() if trace is None else trace)

    def __call__(self, params: PagingParams, cancelled: Cancelled) -> Iterator[Progress | PagingResult]:
        asked = requests(self._trace, params)
        last = max((request.arrival_s for request in asked), default=0.0) or 1.0
        yield Progress(f"Replaying {len(asked)} requests in reserved memory", 0.05)
        found = list(_grow(replay(asked, **reserved_options(params)), cancelled))
        if cancelled():
            return
        reserved = found[-1]
        yield Progress(f"Replaying them in blocks of {params.block_size}", 0.1)
        for paged in _grow(replay(asked, **paged_options(params)), cancelled):
            yield PagingResult(params, reserved, paged)
            done = 0.1 + 0.6 * min(1.0, paged.finished_s / last)
            yield Progress(f"In blocks of {params.block_size}: {paged.finished_s:.0f} s of arrivals", done)
        if cancelled():
            return
        yield Progress(f"Block tables, {TABLES_AT_S:g} s into the replay", 0.75)
        tables = tables_at(asked, TABLES_AT_S, **paged_options(params))
        if not cancelled():
            yield PagingResult(params, reserved, paged, tables)
