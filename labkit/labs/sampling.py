"""The sampling lab of chapter 06: temperature, top_k, top_p; the next token, the text, what is accepted of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._result import LabResult
from labkit.labs._sampling_compute import SamplingCompute
from labkit.labs._sampling_figure import build_figure, draw
from labkit.labs._sampling_result import SamplingParams, SamplingResult
from labkit.labs._sampling_texts import texts_html
from labkit.labs._spec import LabSpec
from labkit.labs._speculative_models import Targets
from labkit.labs._speculative_result import EAGLE, ITSELF, PACKED, PROPOSERS
from labkit.measure import device_name
from labkit.models import LoadedModel
from labkit.speculative.prompts import load_prompts, typical_prompt

_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
_TOP_K = (0, 1, 2, 5, 10, 20, 50, 100)
_TOP_P = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
_DEFAULT_TEMPERATURE, _DEFAULT_PROPOSER, _DEFAULT_WEIGHTS = 0.8, EAGLE, PACKED
_NEW_TOKENS, _PROMPTS, _SEEDS, _PROMPT_WIDTH = 40, 6, 10, 26
_COLD, _HOT = 0.0, 1.2

_HOW = (
    "Temperature divides the logits: below 1 it favours the likeliest tokens, above 1 the rare ones. top_k then keeps "
    "the k likeliest, top_p the fewest that together reach p. Move a slider. Left: what may come next; above: three "
    "texts drawn so; right: how much of a draft, sampled in the same way, the target accepts. MEASURED at each move."
)


class _SamplingLab(Lab):
    """A lab that shows its texts, as they come, above the figure."""

    def _build(self) -> list[widgets.Widget]:
        self.texts = widgets.HTML()
        parts = super()._build()
        parts.insert(parts.index(self.figure), self.texts)
        return parts

    def _show(self, result: LabResult) -> None:
        self.texts.value = texts_html(result)
        super()._show(result)


def _slider(description: str, options: Sequence[object], value: object) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(
        options=options,
        value=value,
        description=description,
        continuous_update=False,
        layout={"width": "290px"},
        style={"description_width": "initial"},
    )


def _choice(description: str, options: Sequence[object], value: object, width: str) -> widgets.Dropdown:
    style = {"description_width": "initial"}
    return widgets.Dropdown(options=options, value=value, description=description, layout={"width": width}, style=style)


def from_cold_to_hot(results: Sequence[SamplingResult]) -> str | None:
    """What the latest pair of the question's temperatures, alike in all else, says of acceptance; None while there is
    no such pair."""
    known = {r.params: r for r in results if r.alpha is not None}
    for last in reversed(results):
        same = [r for r in known.values() if r.params.same_but_temperature == last.params.same_but_temperature]
        found = {r.params.temperature: r for r in same}
        if _COLD in found and _HOT in found:
            return f"{_compared(found[_COLD], found[_HOT])} {_with_one(list(known.values()))}"
    return None


def _compared(cold: SamplingResult, hot: SamplingResult) -> str:
    change = hot.alpha - cold.alpha
    noise = 2 * (cold.alpha_error**2 + hot.alpha_error**2) ** 0.5
    verdict = "it falls" if change < 0 else "it rises"
    sure = "" if abs(change) > noise or not change else f", by less than so few tested tokens can tell (± {noise:.0%})"
    figures = f"{cold.alpha:.0%} at {_COLD:g}, {hot.alpha:.0%} at {_HOT:g}"
    theory = f"Σ min(p, q): {cold.expected_alpha:.0%} and {hot.expected_alpha:.0%}"
    return f"{verdict if change else 'it stays'}{sure}: {figures} ({theory})."


def _with_one(results: Sequence[SamplingResult]) -> str:
    """The question's other half: top_k 1 at a temperature above 0."""
    one = next((r for r in reversed(results) if r.params.top_k == 1 and r.params.temperature > 0), None)
    if one is None:
        return "Now set top_k to 1."
    return f"With top_k 1 at {one.params.temperature:g}: {one.alpha:.0%}, greedy again."


def sampling_lab(
    model: str | LoadedModel = "smollm2-135m",
    *,
    device: torch.device | str | None = None,
    head: str | Path | None = None,
) -> Lab:
    """A lab over temperature, top_k and top_p: which tokens may come next, what texts come of it, and how much of a
    draft is accepted, beside what p and q say.

    `model` is what `load_model` takes, or a loaded model on `device`; `head` the file of an EAGLE head trained for it,
    in place of the course's. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    whole = "float32" if device.type == "cpu" else "bfloat16"
    if isinstance(model, LoadedModel):
        whole = str(model.model.dtype).removeprefix("torch.")
    prompts = (typical_prompt(), *load_prompts("chat")[: _PROMPTS - 1])
    short = [text if len(text) <= _PROMPT_WIDTH else f"{text[:_PROMPT_WIDTH].rstrip()}…" for text in prompts]
    drafters = [("its own int4 copy" if one == ITSELF else one, one) for one in PROPOSERS]
    question = f"From temperature {_COLD:g} to {_HOT:g}: what does acceptance do? And with top_k 1 at {_HOT:g}?"
    return _SamplingLab(
        LabSpec(
            name="sampling_lab",
            title=f"What do sampling parameters change? {name} on {device_name(device)}",
            how=_HOW,
            knobs={
                "temperature": _slider("Temperature", [(f"{t:g}", t) for t in _TEMPERATURES], _DEFAULT_TEMPERATURE),
                "top_k": _slider("top_k", [(str(k) if k else "off", k) for k in _TOP_K], 0),
                "top_p": _slider("top_p", [(f"{p:g}" if p < 1 else "off", p) for p in _TOP_P], 0.9),
            },
            switches={
                "prompt": _choice("Prompt", list(zip(short, range(len(short)), strict=True)), 0, "300px"),
                "seed": _choice("First seed", list(range(_SEEDS)), 0, "140px"),
                "proposer": _choice("Drafts", drafters, _DEFAULT_PROPOSER, "200px"),
                "weights": _choice("Weights", [PACKED, whole], _DEFAULT_WEIGHTS, "160px"),
            },
            params=lambda **values: SamplingParams(**values, model=name, max_new_tokens=_NEW_TOKENS),
            compute=SamplingCompute(Targets(model, device, head), prompts),
            figure=build_figure,
            draw=draw,
            device=device,
            prediction=Prediction(question, ("it rises", "it falls", "it stays"), from_cold_to_hot),
        )
    )
