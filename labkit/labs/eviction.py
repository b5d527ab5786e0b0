"""The second lab of chapter 03: method, budget, depth; which tokens a cache keeps, and what it still knows."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.labs._eviction_compute import EvictionCompute
from labkit.labs._eviction_figure import build_figure, draw
from labkit.labs._eviction_forms import NAMES, budget_text
from labkit.labs._eviction_result import BUDGETS, DEPTHS, METHODS, EvictionParams, EvictionResult
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._spec import LabSpec
from labkit.measure import device_name
from labkit.models import LoadedModel

_ASKED_BUDGET = 0.25
_ASKED = ("sinks", "heavy_hitters", "snapkv")

_HOW = (
    "A prompt hides a number, at the depth that you set, and asks for it at its end. It goes through a cache that may "
    "hold only a share of the tokens: what is pale in the map is gone for good. Below, ten such prompts are asked, and "
    "perplexity is measured through the same cache. SnapKV compresses a prompt: it is scored on what follows one."
)


def _slider(description: str, options: Sequence[object], value: object) -> widgets.SelectionSlider:
    width = {"width": "290px"}
    style = {"description_width": "60px"}
    return widgets.SelectionSlider(
        options=options, value=value, description=description, continuous_update=False, layout=width, style=style
    )


def who_finds(results: Sequence[EvictionResult]) -> str | None:
    """What the latest of the question's settings say; None while one is missing."""
    found = {r.params.method: r for r in results if r.params.budget == _ASKED_BUDGET and r.needles and r.needles.firm}
    if not found.keys() >= set(_ASKED):
        return None
    asked = [(NAMES[method], found[method]) for method in _ASKED]
    needles = ", ".join(f"{name} {r.needles.count} of {r.needles.of}" for name, r in asked)
    losses = [f"{name} {r.quality.ratio:.3g}x" for name, r in asked if r.quality]
    return f"{needles}. Perplexity, times that of all tokens: {', '.join(losses)}."


def eviction_lab(model: str | LoadedModel = "smollm2-135m", *, device: torch.device | str | None = None) -> Lab:
    """A lab over method, budget and the needle's depth: what a KV cache that forgets keeps, and what it still knows.

    `model` is what `load_model` takes, or a loaded model on `device`. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    knobs = {
        "method": _slider("Method", [(NAMES[method], method) for method in METHODS], "sinks"),
        "budget": _slider("Budget", [(budget_text(budget), budget) for budget in BUDGETS], _ASKED_BUDGET),
        "depth": _slider("Depth", [(f"{depth:g}", depth) for depth in DEPTHS], DEPTHS[0]),
    }
    question = f"At {budget_text(_ASKED_BUDGET)} of the tokens: who finds the most needles?"
    return Lab(
        LabSpec(
            name="eviction_lab",
            title=f"What may a KV cache forget? {name} on {device_name(device)}",
            how=_HOW,
            knobs=knobs,
            params=lambda **values: EvictionParams(model=name, **values),
            compute=EvictionCompute(model, device),
            figure=build_figure,
            draw=draw,
            device=device,
            prediction=Prediction(question, tuple(NAMES[method] for method in _ASKED), who_finds),
        )
    )
