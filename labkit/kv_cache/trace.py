"""Requests as they really arrived, replayed against a block manager and against reserved memory.

The arrivals and lengths are facts (`data/arrival_trace.csv`, with its source). How fast tokens are made is MODELLED:
every running sequence makes `tokens_per_second`, and a prompt is there at once. The block manager is the real one.
"""

import csv
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from labkit import _check
from labkit._paths import DATA
from labkit.kv_cache.blocks import OutOfBlocks, Snapshot
from labkit.kv_cache.trace_memory import Memory, PagedMemory, ReservedMemory

POLICIES = ("paged", "max_length", "max_new")
# Of the default model in bfloat16: 1.5 GB. About as much as the trace's busiest minute would fill.
SLOTS = 65_536


@dataclass(frozen=True)
class Request:
    """Seconds since the first request, tokens of the prompt, and tokens that were then generated."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Sample:
    """One moment. `tokens_held` of `slots_allocated`; sequences running and waiting; preemptions so far."""

    time_s: float
    tokens_held: int
    slots_allocated: int
    running: int
    waiting: int
    preemptions: int

    @property
    def waste(self) -> float:
        """1 - tokens held / slots allocated; 0 where nothing is allocated."""
        return 1 - self.tokens_held / self.slots_allocated if self.slots_allocated else 0.0


@dataclass(frozen=True)
class Summary:
    """A whole replay: waste averaged over the time in which something was allocated, the most sequences that ran at
    once and their number on average, preemptions, and when the last request was done."""

    policy: str
    block_size: int | None
    waste: float
    peak_running: int
    mean_running: float
    preemptions: int
    finished_s: float


def load_trace(limit: int | None = None) -> tuple[Request, ...]:
    """The first `limit` requests (all by default) of the kept trace: a conversation service in Azure, November 2023
    (Patel et al., "Splitwise", ISCA 2024; CC BY 4.0)."""
    with open(DATA / "arrival_trace.csv", encoding="utf-8", newline="") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        trace = tuple(Request(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["new_tokens"])) for r in rows)
    return trace[: None if limit is None else _check.integer("limit", limit, 1)]


@dataclass
class _Running:
    number: int
    request: Request
    handle: int
    done: int


class _Server:
    """First come, first served; the youngest sequence gives way where memory runs out, and is computed again later."""

    def __init__(self, trace: Sequence[Request], memory: Memory) -> None:
        self.memory = memory
        self.coming = deque(sorted(enumerate(trace), key=lambda item: item[1].arrival_s))
        self.waiting: deque[tuple[int, Request, int]] = deque()
        self.running: list[_Running] = []
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.coming or self.waiting or self.running)

    def arrive(self, time_s: float) -> None:
        while self.coming and self.coming[0][1].arrival_s <= time_s:
            self.waiting.append((*self.coming.popleft(), 0))

    def grow(self, count: int) -> None:
        """Every running sequence makes up to `count` tokens, the oldest first; those that are done leave."""
        place = 0
        while place < len(self.running):
            one = self.running[place]
            new = min(count, one.request.new_tokens - one.done)
            try:
                self.memory.grow(one.handle, new)
            except OutOfBlocks:
                self._preempt()
                continue
            one.done += new
            if one.done < one.request.new_tokens:
                place += 1
            else:
                self.memory.release(self.running.pop(place).handle)

    def _preempt(self) -> None:
        last = self.running.pop()
        self.memory.release(last.handle)
        self.waiting.appendleft((last.number, last.request, last.done))
        self.preemptions += 1

    def admit(self) -> None:
        while self.waiting:
            number, request, done = self.waiting[0]
            if not self.memory.can_admit(number, request.prompt_tokens, done):
                return
            self.waiting.popleft()
            handle = self.memory.admit(number, request.prompt_tokens, done)
            self.running.append(_Running(number, request, handle, done))


def _memory(
    policy: str,
    block_size: int,
    num_blocks: int | None,
    max_length: int,
    max_new: int,
    watermark: float | int,
    shared_prefix: int,
) -> Memory:
    _check.choice("policy", policy, POLICIES)
    _check.integer("block_size", block_size, 1)
    num_blocks = SLOTS // block_size if num_blocks is None else _check.integer("num_blocks", num_blocks, 1)
    if policy == "paged":
        return PagedMemory(num_blocks, block_size, watermark, shared_prefix)
    return ReservedMemory(num_blocks * block_size, max_length, max_new if policy == "max_new" else None)


def _start(trace: Sequence[Request], memory: Memory, tokens_per_second: float, step_s: float) -> Iterator[Sample]:
    """A replay whose arguments are checked already; the steps are made as they are asked for."""
    rate = _check.number("tokens_per_second", tokens_per_second, 1e-3)
    step_s = _check.number("step_s", step_s, 1e-3)
    _check.require(len(trace) > 0, "trace", "no request", "at least one")
    for request in trace:
        memory.check(request.prompt_tokens, request.new_tokens)
    return _steps(_Server(trace, memory), rate, step_s)


def _steps(server: _Server, rate: float, step_s: float) -> Iterator[Sample]:
    made = 0
    for step in itertools.count():
        time_s = round(step * step_s, 6)
        server.arrive(time_s)
        due = int(time_s * rate)
        server.grow(due - made)
        made = due
        server.admit()
        counts = len(server.running), len(server.waiting), server.preemptions
        yield Sample(time_s, server.memory.tokens_held, server.memory.slots_allocated, *counts)
        if not server.busy:
            return


def replay(
    trace: Sequence[Request],
    *,
    policy: str = "paged",
    block_size: int = 16,
    num_blocks: int | None = None,
    max_length: int = 8192,
    max_new: int = 1024,
    watermark: float | int = 0.01,
    tokens_per_second: float = 20.0,
    step_s: float = 0.1,
    shared_prefix: int = 0,
) -> Iterator[Sample]:
    """The trace, a step of `step_s` seconds at a time, until all requests are done.

    policy: "paged" (a `BlockManager`), or memory reserved in one piece for each request, of the same
    `num_blocks * block_size` slots in all (65,536 by default): "max_length" slots, or its prompt and `max_new` more.
    watermark: what admission leaves free, as in `BlockManager`. tokens_per_second: of each running sequence.
    shared_prefix: so many tokens begin every prompt (a system prompt); MODELLED, the trace does not tell. Paged only.
    Errors: ValueError for wrong arguments and for a request that could never be served.
    """
    memory = _memory(policy, block_size, num_blocks, max_length, max_new, watermark, shared_prefix)
    return _start(trace, memory, tokens_per_second, step_s)


def summarize(trace: Sequence[Request], *, policy: str = "paged", block_size: int = 16, **options: object) -> Summary:
    """`replay` to its end; takes its options."""
    samples = list(replay(trace, policy=policy, block_size=block_size, **options))
    held = [sample for sample in samples if sample.slots_allocated]
    return Summary(
        policy,
        block_size if policy == "paged" else None,
        sum(sample.waste for sample in held) / len(held),
        max(sample.running for sample in samples),
        sum(sample.running for sample in samples) / len(samples),
        samples[-1].preemptions,
        samples[-1].time_s,
    )


def compare(
    trace: Sequence[Request], *, block_sizes: Sequence[int] = (1, 4, 16, 64, 256), slots: int = SLOTS, **options: object
) -> tuple[Summary, ...]:
    """Both reservations, then every block size, in the same memory of `slots`; takes the options of `replay`."""
    reserved = [summarize(trace, policy=p, block_size=1, num_blocks=slots, **options) for p in POLICIES[1:]]
    paged = [summarize(trace, block_size=size, num_blocks=slots // size, **options) for size in block_sizes]
    return (*reserved, *paged)


def tables_at(
    trace: Sequence[Request],
    time_s: float,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    watermark: float | int = 0.01,
    tokens_per_second: float = 20.0,
    step_s: float = 0.1,
    shared_prefix: int = 0,
) -> Snapshot:
    """The block tables `time_s` seconds into the paged replay (or at its end, if that comes before), to be drawn."""
    memory = _memory("paged", block_size, num_blocks, 1, 1, watermark, shared_prefix)
    for sample in _start(trace, memory, tokens_per_second, step_s):
        if sample.time_s >= time_s:
            break
    return memory.manager.snapshot()
