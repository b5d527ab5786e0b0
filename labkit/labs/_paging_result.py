"""What `paging_lab` finds out: its parameters, a replay in blocks beside one in reserved memory, and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit import _check
from labkit.kv_cache.blocks import Snapshot
from labkit.kv_cache.trace import SLOTS, Sample
from labkit.labs import _paging_forms as forms
from labkit.labs._result import Number
from labkit.measure import Measurement

BLOCK_SIZES = (1, 4, 16, 32, 64, 128, 256)
# What a request reserves beside its prompt; the last is all that the model takes.
MAX_NEW = (1024, 2048, 4096, 8192)
SHARED_PREFIXES = (0, 256, 1024)
MAX_LENGTH = 8192
# The moment at which block tables are drawn: about half the memory is taken, and blocks have changed hands often.
TABLES_AT_S = 42.5
_SECONDS_A_POINT = 0.5


@dataclass(frozen=True)
class PagingParams:
    """One setting of the lab. A request reserves its prompt and `max_new` slots more, at most `max_length`; a system
    prompt of `shared_prefix` tokens comes before every prompt; `slots`: tokens that the memory has room for;
    `tokens_per_second` of each running sequence."""

    block_size: int
    max_new: int
    shared_prefix: int
    max_length: int = MAX_LENGTH
    slots: int = SLOTS
    tokens_per_second: float = 20.0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_new", "max_length", "slots"):
            _check.integer(name, getattr(self, name), 1)
        _check.integer("shared_prefix", self.shared_prefix, 0)
        _check.number("tokens_per_second", self.tokens_per_second, 1e-3)
        even = self.slots % self.block_size == 0
        _check.require(even, "block_size", self.block_size, f"what divides the {self.slots} slots")


@dataclass(frozen=True)
class Replay:
    """All requests served, or those so far. `waste` is averaged over the time in which something was allocated,
    `mean_length` the tokens held for each running sequence (one that is shared counts once), `samples` for drawing."""

    waste: float
    peak_running: int
    mean_length: float
    preemptions: int
    finished_s: float
    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Replay:
        """Of every sample of a replay up to now, at least one."""
        wastes = [sample.waste for sample in samples if sample.slots_allocated]
        running, last = sum(sample.running for sample in samples), samples[-1]
        drawn = [s for s in samples[:-1] if s.time_s % _SECONDS_A_POINT == 0]
        return cls(
            waste=sum(wastes) / len(wastes) if wastes else 0.0,
            peak_running=max(sample.running for sample in samples),
            mean_length=sum(sample.tokens_held for sample in samples) / running if running else 0.0,
            preemptions=last.preemptions,
            finished_s=last.time_s,
            samples=(*drawn, last),
        )


@dataclass(frozen=True)
class Block:
    """One block of the pool: the sequences whose tables hold it, where it stands in the first one's table and how many
    blocks that has, and the tokens in it. Without a sequence it is free."""

    number: int
    sequences: tuple[int, ...]
    place: int
    of: int
    fill: int


def first_blocks(snapshot: Snapshot, count: int) -> tuple[Block, ...]:
    """The first `count` blocks of the pool at one moment."""
    owners: dict[int, list[tuple[int, int]]] = {}
    for sequence, table in snapshot.tables.items():
        for place, block in enumerate(table):
            owners.setdefault(block, []).append((sequence, place))
    return tuple(_block(snapshot, number, owners.get(number, [])) for number in range(min(count, snapshot.num_blocks)))


def _block(snapshot: Snapshot, number: int, owners: list[tuple[int, int]]) -> Block:
    if not owners:
        return Block(number, (), 0, 0, 0)
    fills = [
        snapshot.last_fill[sequence] if place == len(snapshot.tables[sequence]) - 1 else snapshot.block_size
        for sequence, place in owners
    ]
    first, place = owners[0]
    return Block(number, tuple(s for s, _ in owners), place, len(snapshot.tables[first]), max(fills))


@dataclass(frozen=True)
class PagingResult:
    """What is known of a setting so far: `tables` is None until both replays are done, and `paged` one of the requests
    served by then."""

    params: PagingParams
    reserved: Replay
    paged: Replay
    tables: Snapshot | None = None

    @property
    def empty_slots(self) -> float:
        """Slots that a sequence leaves empty in its last block, on average over all lengths: MODELLED."""
        return (self.params.block_size - 1) / 2

    @property
    def formula_waste(self) -> float:
        """`empty_slots` over the mean length: MODELLED."""
        return self.empty_slots / self.paged.mean_length if self.paged.mean_length else 0.0

    @property
    def table_entries(self) -> int:
        """Entries of all block tables together; 0 while there are none."""
        return sum(len(table) for table in self.tables.tables.values()) if self.tables else 0

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
