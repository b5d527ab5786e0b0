"""FlashAttention's forward pass stopped after some tiles: its own functions, and what they held then. No widgets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.kernels.flash_attention.reference import flash_attention_reference
from labkit.kernels.flash_attention.tiled import RowState, attend_tile, empty_state, finish, tile_scores
from labkit.kernels.flash_attention.tiles import Tile, tiles

# Times what a normal distribution gives: scores that differ as much as a model's do make maxima that move.
_SPREAD = 1.5


@dataclass(frozen=True)
class Case:
    """Queries, keys and values `(1, 1, length, head_dim)` in float32, and the exact output in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    exact: Tensor
    causal: bool
    softmax_scale: float

    @classmethod
    def of(cls, length: int, head_dim: int, causal: bool, seed: int) -> Case:
        """Normally distributed, from a seed: scores have a standard deviation of about 1.5."""
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 1, length, head_dim, generator=generator) for _ in range(3))
        q = _SPREAD * q
        scale = 1 / math.sqrt(head_dim)
        exact = flash_attention_reference(q.double(), k.double(), v.double(), causal, scale)
        return cls(q, k, v, exact, causal, scale)


@dataclass(frozen=True)
class Traffic:
    """Bytes moved between memory and the chip."""

    q: int = 0
    k: int = 0
    v: int = 0
    written: int = 0

    @property
    def read(self) -> int:
        return self.q + self.k + self.v

    @property
    def moved(self) -> int:
        return self.read + self.written


@dataclass(frozen=True)
class Held:
    """Bytes of what a step works on: the blocks, the tile of scores, and the rows' maxima, sums and outputs."""

    q: int
    k: int
    v: int
    scores: int
    state: int

    @property
    def total(self) -> int:
        return self.q + self.k + self.v + self.scores + self.state


@dataclass(frozen=True)
class Visit:
    """One tile, and what it did to the last row of its query block, the one that is watched.

    `most_before`, `total_before`: the running maximum and sum as they were (minus infinity and 0 at a row's first
    tile); `tile_most` the row's largest score in this tile; `correction` is exp(most_before - most), by which sum and
    output shrink; `error` the output's largest difference from the exact row. `rescaled`: rows of the block that had a
    maximum and got a new one. `traffic`: from the walk's begin to here.
    """

    tile: Tile
    tile_most: float
    most_before: float
    most: float
    correction: float
    total_before: float
    total: float
    error: float
    rescaled: int
    ends_block: bool
    held: Held
    traffic: Traffic

    @property
    def row(self) -> int:
        return self.tile.q_stop - 1

    @property
    def first(self) -> bool:
        """Whether the row has seen no tile before."""
        return self.total_before == 0

    @property
    def new_maximum(self) -> bool:
        """Whether the row had a maximum and got a new one."""
        return not self.first and self.most > self.most_before


@dataclass(frozen=True)
class Walk:
    """The pass after some tiles. By row: maximum, sum, output and its difference from the exact one, None where no tile
    was visited. `weights`: exp(score - maximum) / sum, None where no tile was visited; `masked`: the cells (row, key)
    of visited tiles that the causal mask hides, whose weight is None too."""

    visits: tuple[Visit, ...]
    most: tuple[float | None, ...]
    total: tuple[float | None, ...]
    out: tuple[tuple[float, ...] | None, ...]
    errors: tuple[float | None, ...]
    weights: tuple[tuple[float | None, ...], ...]
    masked: frozenset[tuple[int, int]]


def walk(case: Case, block_size: int, steps: int) -> Walk:
    """The first `steps` tiles of the forward pass in blocks of `block_size` queries and keys."""
    length = case.q.shape[2]
    path = list(tiles(length, length, (block_size, block_size), case.causal))
    seen = torch.full((length, length), torch.nan)
    states: dict[tuple[int, int], RowState] = {}
    visits: list[Visit] = []
    for index, tile in enumerate(path[:steps]):
        rows = (tile.q_start, tile.q_stop)
        q_rows = case.q[:, :, tile.q_start : tile.q_stop] * case.softmax_scale
        first = rows not in states
        before = empty_state(q_rows) if first else states[rows]
        scores = tile_scores(q_rows, case.k, tile, 0, None)
        values = case.v[:, :, tile.k_start : tile.k_stop]
        states[rows] = after = attend_tile(before, scores, values)
        seen[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] = scores[0, 0]
        held = _held(q_rows, case.k[:, :, tile.k_start : tile.k_stop], values, scores, after)
        ends = index + 1 == len(path) or path[index + 1].q_start != tile.q_start
        traffic = _moved(visits[-1].traffic if visits else Traffic(), held, after, first, ends)
        visits.append(_visit(case, tile, scores, before, after, ends, held, traffic))
    return _stand(case, tuple(visits), states, seen)


def _held(q: Tensor, k: Tensor, v: Tensor, scores: Tensor, state: RowState) -> Held:
    return Held(*(sum(t.nbytes for t in group) for group in ((q,), (k,), (v,), (scores,), state)))


def _moved(so_far: Traffic, held: Held, state: RowState, first: bool, ends: bool) -> Traffic:
    """Q is read at a query block's first tile; at its last one, the output and one statistic a row are written."""
    written = sum(t.nbytes for t in finish(state)) if ends else 0
    q = held.q if first else 0
    return Traffic(so_far.q + q, so_far.k + held.k, so_far.v + held.v, so_far.written + written)


def _visit(
    case: Case,
    tile: Tile,
    scores: Tensor,
    before: RowState,
    after: RowState,
    ends: bool,
    held: Held,
    traffic: Traffic,
) -> Visit:
    out, _ = finish(after)
    was, now = before.most[0, 0, -1], after.most[0, 0, -1]
    rose = (after.most > before.most) & (before.most > -torch.inf)
    return Visit(
        tile=tile,
        tile_most=float(scores[0, 0, -1].max()),
        most_before=float(was),
        most=float(now),
        correction=float(torch.exp(was - now)),
        total_before=float(before.total[0, 0, -1]),
        total=float(after.total[0, 0, -1]),
        error=float((out[0, 0, -1] - case.exact[0, 0, tile.q_stop - 1]).abs().max()),
        rescaled=int(rose.sum()),
        ends_block=ends,
        held=held,
        traffic=traffic,
    )


def _stand(case: Case, visits: tuple[Visit, ...], states: dict[tuple[int, int], RowState], seen: Tensor) -> Walk:
    """Every row's state, and the weights under it."""
    length = case.q.shape[2]
    most, total, out, errors = ([None] * length for _ in range(4))
    weights: list[tuple[float | None, ...]] = [(None,) * length] * length
    for (start, stop), state in states.items():
        rows, _ = finish(state)
        wide = torch.exp(seen[start:stop] - state.most[0, 0, :, None]) / state.total[0, 0, :, None]
        for i, row in enumerate(range(start, stop)):
            most[row], total[row] = float(state.most[0, 0, i]), float(state.total[0, 0, i])
            out[row] = tuple(rows[0, 0, i].tolist())
            errors[row] = float((rows[0, 0, i] - case.exact[0, 0, row]).abs().max())
            shown = wide[i].masked_fill(seen[row].isneginf(), torch.nan).tolist()
            weights[row] = tuple(None if math.isnan(weight) else weight for weight in shown)
    masked = frozenset((row, key) for row, key in seen.isneginf().nonzero().tolist())
    return Walk(visits, tuple(most), tuple(total), tuple(out), tuple(errors), tuple(weights), masked)
