"""The second lab of chapter 04: FlashAttention's tiles walk over the score matrix, one a step."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._spec import LabSpec
from labkit.labs._tile_walk_compute import compute
from labkit.labs._tile_walk_figure import build_figure, draw
from labkit.labs._tile_walk_player import StepPlayer
from labkit.labs._tile_walk_result import (
    BLOCK_SIZES,
    HEAD_DIM,
    LENGTH,
    TileWalkParams,
    TileWalkResult,
    tile_count,
)

_DEFAULT_SIZE, _ASKED_SIZE = 8, 4
# In the last row of tiles: some are done, one is at hand, some are to come, some are skipped.
_DEFAULT_STEP = 8

_HOW = (
    f"Press Play: attention of {LENGTH} queries to {LENGTH} keys (random, head size {HEAD_DIM}) is computed tile by "
    "tile, by the same functions as labkit's tiled FlashAttention. Left: the weights as they stand. Right: the last "
    "row of the query block. Whenever a larger score turns up, what it has summed shrinks; its output is wrong until "
    "its last tile, and then exact."
)


class _WalkLab(Lab):
    """A lab whose settings take milliseconds and follow each other on their own: the status line does not say that each
    is starting, which would flicker, and a setting that comes twice at once, through two knobs, is measured once."""

    _asked: dict[str, object] | None = None

    def measure(self) -> None:
        self._asked = {name: knob.value for name, knob in self.spec.knobs.items()}
        self._worker.submit(self._asked)

    def reset(self) -> None:
        self.spec.knobs["step"].stop()  # or it would play on from the first setting
        super().reset()

    def _moved(self, change: object) -> None:
        if self._asked != {name: knob.value for name, knob in self.spec.knobs.items()}:
            super()._moved(change)


def rescales_a_row(results: Sequence[TileWalkResult]) -> str | None:
    """What the latest whole walk over all tiles of the asked size says; None while there is none."""
    found = [r for r in results if r.done and r.params.block_size == _ASKED_SIZE and not r.params.causal]
    if not found:
        return None
    result, count = found[-1], found[-1].params.length // _ASKED_SIZE
    mean = result.rescales / result.params.length
    expected = sum(1 / n for n in range(2, count + 1))
    return (
        f"{mean:.2g} on average. The largest of all scores so far is seldom in the newest tile: in random order the "
        f"n-th one holds it once in n, 1/2 + ... + 1/{count} = {expected:.2g} times in all."
    )


def tile_walk_lab() -> Lab:
    """A lab over block size, causal mask and step: what FlashAttention holds, has moved and has found out after so many
    tiles, beside standard attention.

    It runs on the CPU and loads no model. Errors are shown in the lab.
    """
    size = widgets.SelectionSlider(
        options=BLOCK_SIZES,
        value=_DEFAULT_SIZE,
        description="Block size",
        layout={"width": "250px"},
        style={"description_width": "75px"},
    )
    causal = widgets.Checkbox(value=True, description="Causal mask", indent=False, layout={"width": "130px"})
    step = StepPlayer(tile_count(_DEFAULT_SIZE, True), _DEFAULT_STEP)
    for knob in (size, causal):  # before the lab observes them: the step it then measures is one of the new walk
        knob.observe(lambda _: step.resize(tile_count(size.value, causal.value)), "value")
    tiles_a_row = LENGTH // _ASKED_SIZE
    question = (
        f"Set blocks of {_ASKED_SIZE}, no mask, Tile at its end: every row meets {tiles_a_row} tiles. How many of the "
        f"last {tiles_a_row - 1} bring it a new maximum, so that its sum and output are rescaled?"
    )
    options = (f"all {tiles_a_row - 1}", "about 5", "about 2", "none")
    return _WalkLab(
        LabSpec(
            name="tile_walk_lab",
            title="How does FlashAttention walk over the score matrix?",
            how=_HOW,
            knobs={"block_size": size, "causal": causal, "step": step},
            params=TileWalkParams,
            compute=compute,
            figure=build_figure,
            draw=draw,
            device=None,
            prediction=Prediction(question, options, rescales_a_row),
        )
    )
