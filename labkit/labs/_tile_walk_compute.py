"""What `tile_walk_lab` measures: FlashAttention's own forward pass, stopped after some tiles. No widgets here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labkit.labs._tile_walk_result import TileWalkParams, TileWalkResult
from labkit.labs._tile_walk_steps import Case, walk


def compute(params: TileWalkParams, cancelled: Callable[[], bool]) -> Iterator[TileWalkResult]:
    """The pass from its begin to `params.step`, which takes milliseconds: one result, none where it is cancelled."""
    if cancelled():
        return
    case = Case.of(params.length, params.head_dim, params.causal, params.seed)
    yield TileWalkResult(params, walk(case, params.block_size, params.step))
