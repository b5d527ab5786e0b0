"""What `tile_walk_lab` finds out: its parameters, and the pass after some tiles beside standard attention."""

from __future__ import annotations

from dataclasses import dataclass

from labkit import _check
from labkit.attention.traffic import AttentionShape, standard_costs, standard_extra_bytes
from labkit.kernels.flash_attention import tiles
from labkit.labs import _tile_walk_forms as forms
from labkit.labs._result import Number
from labkit.labs._tile_walk_steps import Held, Traffic, Visit, Walk
from labkit.measure import Measurement

BLOCK_SIZES = (4, 8, 16)
LENGTH, HEAD_DIM, SEED = 32, 16, 35
DTYPE = "float32"


def tile_count(block_size: int, causal: bool, length: int = LENGTH) -> int:
    """Tiles that the forward pass visits."""
    return tiles.tile_count(length, length, (block_size, block_size), causal)


@dataclass(frozen=True)
class TileWalkParams:
    """One setting of the lab: blocks of `block_size` queries and keys, and the pass stopped after `step` tiles. One
    head of `length` queries and as many keys."""

    block_size: int
    causal: bool
    step: int
    length: int = LENGTH
    head_dim: int = HEAD_DIM
    seed: int = SEED

    def __post_init__(self) -> None:
        _check.integer("length", self.length, 1)
        _check.integer("head_dim", self.head_dim, 1)
        _check.seed("seed", self.seed)
        _check.integer("block_size", self.block_size, 1, self.length)
        _check.require(isinstance(self.causal, bool), "causal", self.causal, "True or False")
        _check.integer("step", self.step, 0, self.tiles)

    @property
    def tiles(self) -> int:
        """Tiles that are visited in all."""
        return tile_count(self.block_size, self.causal, self.length)

    @property
    def grid(self) -> int:
        """Tiles of the whole matrix."""
        return tile_count(self.block_size, False, self.length)

    @property
    def shape(self) -> AttentionShape:
        """What the byte counts take."""
        return AttentionShape(1, 1, 1, self.length, self.length, self.head_dim, self.causal)


@dataclass(frozen=True)
class TileWalkResult:
    """The pass as it stood after `params.step` tiles."""

    params: TileWalkParams
    walk: Walk

    @property
    def present(self) -> Visit | None:
        """The tile visited last; None before the first."""
        return self.walk.visits[-1] if self.walk.visits else None

    @property
    def row_visits(self) -> tuple[Visit, ...]:
        """Those of the present query block, whose last row is watched."""
        return tuple(v for v in self.walk.visits if v.row == self.present.row)

    @property
    def rows_done(self) -> int:
        """Rows that have seen all their keys."""
        return max((v.tile.q_stop for v in self.walk.visits if v.ends_block), default=0)

    @property
    def largest_error(self) -> float | None:
        """Of the rows that are done, the largest difference from the exact output; None while there is none."""
        return max(self.walk.errors[: self.rows_done]) if self.rows_done else None

    @property
    def rescales(self) -> int:
        """Times that a row which had a maximum got a new one, over all rows."""
        return sum(visit.rescaled for visit in self.walk.visits)

    @property
    def done(self) -> bool:
        """Whether every tile has been visited."""
        return self.params.step == self.params.tiles

    @property
    def traffic(self) -> Traffic:
        """Bytes moved so far."""
        return self.present.traffic if self.present else Traffic()

    @property
    def held(self) -> Held:
        """What this step works on."""
        return self.present.held if self.present else Held(0, 0, 0, 0, 0)

    @property
    def standard_bytes(self) -> int:
        """What standard attention moves in all: MODELLED."""
        return sum(cost.bytes for cost in standard_costs(self.params.shape, DTYPE))

    @property
    def standard_extra(self) -> int:
        """What standard attention holds beside its inputs and its output, scores and weights whole: MODELLED."""
        return standard_extra_bytes(self.params.shape, DTYPE)

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
