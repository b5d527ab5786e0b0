"""The lab of chapter 05: draft length, temperature, proposer; which drafted tokens the target keeps, what it gains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._result import LabResult
from labkit.labs._spec import LabSpec
from labkit.labs._speculative_compute import SpeculativeCompute
from labkit.labs._speculative_figure import build_figure, draw
from labkit.labs._speculative_forms import times
from labkit.labs._speculative_models import Targets
from labkit.labs._speculative_result import (
    EAGLE,
    ITSELF,
    MOST_DRAFTED,
    PACKED,
    PROPOSERS,
    SpeculativeParams,
    SpeculativeResult,
)
from labkit.labs._speculative_trace import trace_html
from labkit.measure import device_name
from labkit.models import LoadedModel
from labkit.speculative.prompts import typical_prompt

_TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0, 1.25, 1.5)
_DEFAULT_DRAFTED, _DEFAULT_PROPOSER, _NEW_TOKENS = 3, EAGLE, 64
_PROMPTS = {"chat": "chat", "to copy from": "copy_heavy", "no repeats": "no_repeats"}
_SHAPES = {"a chain": "chain", "a tree (EAGLE)": "tree"}
_SHORT, _LONG = 2, 6

_HOW = (
    "Move a slider: something cheap drafts a few tokens, the target verifies them in one call, keeps those that it "
    "agrees with and adds one of its own. Below: every token of an answer, by what became of it; then speed, MEASURED "
    "in turn with plain decoding of the same prompt. The answer is the target's whoever drafts; the speed is not."
)


class _SpeculativeLab(Lab):
    """A lab that shows its text, as it comes, above numbers and figure."""

    def _build(self) -> list[widgets.Widget]:
        self.trace = widgets.HTML()
        parts = super()._build()
        parts.insert(parts.index(self.numbers), self.trace)
        return parts

    def _show(self, result: LabResult) -> None:
        self.trace.value = trace_html(result)
        super()._show(result)


def _slider(description: str, options: Sequence[object], value: object, width: str) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(
        options=options,
        value=value,
        description=description,
        continuous_update=False,
        layout={"width": width},
        style={"description_width": "initial"},
    )


def _choice(description: str, options: object, value: str, width: str) -> widgets.Dropdown:
    style = {"description_width": "initial"}
    return widgets.Dropdown(options=options, value=value, description=description, layout={"width": width}, style=style)


def fastest_length(results: Sequence[SpeculativeResult]) -> str | None:
    """Which draft length was fastest, of the latest setting that was measured with a short, a middling and a long one;
    None while there is none."""
    for last in reversed(results):
        same = [r for r in results if r.params.same_but_length == last.params.same_but_length and r.speedup]
        found = {r.params.num_assistant_tokens: r for r in same}
        drafted = [n for n in found if n]
        if drafted and min(drafted) <= _SHORT and max(drafted) >= _LONG and any(_SHORT < n < _LONG for n in drafted):
            return _fastest(found)
    return None


def _fastest(found: dict[int, SpeculativeResult]) -> str:
    best = max(found, key=lambda n: found[n].speedup)
    last = list(found.values())[-1]
    each = ", ".join(f"{times(found[n].speedup)} at {n}" for n in sorted(found))
    modelled = {n: last.model(n) for n in range(MOST_DRAFTED + 1) if last.model(n)}
    model = max(modelled, key=modelled.get)
    where = f"{best}" if found[best].speedup > 1 else "none: plain decoding is fastest"
    return f"{where} ({each}). The time model says {model or 'none'}: {times(modelled[model])}."


def speculative_lab(
    model: str | LoadedModel = "smollm2-135m",
    *,
    device: torch.device | str | None = None,
    head: str | Path | None = None,
) -> Lab:
    """A lab over draft length, temperature and proposer: what the target keeps of a draft, token by token, and how much
    faster that is than plain decoding, beside what the formulas say.

    `model` is what `load_model` takes, or a loaded model on `device`; `head` the file of an EAGLE head trained for it,
    in place of the course's. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    targets = Targets(model, device, head)
    whole = "float32" if device.type == "cpu" else "bfloat16"
    if isinstance(model, LoadedModel):
        whole = str(model.model.dtype).removeprefix("torch.")
    prompts = {kind: typical_prompt(kind) for kind in _PROMPTS.values()}

    def params(**values: object) -> SpeculativeParams:
        # A tree is the head's; others draft a chain whatever that switch says.
        shape = values["shape"] if values["proposer"] == EAGLE else "chain"
        return SpeculativeParams(**values | {"model": name, "shape": shape, "max_new_tokens": _NEW_TOKENS})

    drafters = [("its own int4 copy" if one == ITSELF else one, one) for one in PROPOSERS]
    question = "The head drafts, greedily, for int4 weights on the chat prompt. Which draft length is fastest?"
    options = ("1 or 2", "3 to 5", "6 to 8", "none: plain decoding")
    return _SpeculativeLab(
        LabSpec(
            name="speculative_lab",
            title=f"What does drafting gain? {name} on {device_name(device)}",
            how=_HOW,
            knobs={
                "num_assistant_tokens": _slider(
                    "Draft length", tuple(range(MOST_DRAFTED + 1)), _DEFAULT_DRAFTED, "270px"
                ),
                "temperature": _slider("Temperature", [(f"{t:g}", t) for t in _TEMPERATURES], 0.0, "280px"),
                "proposer": _slider("Proposer", drafters, _DEFAULT_PROPOSER, "370px"),
            },
            switches={
                "prompt": _choice("Prompt", list(_PROMPTS.items()), "chat", "190px"),
                "weights": _choice("Target's weights", [PACKED, whole], PACKED, "220px"),
                "shape": _choice("Draft is", list(_SHAPES.items()), "chain", "210px"),
            },
            params=params,
            compute=SpeculativeCompute(targets, prompts),
            figure=build_figure,
            draw=draw,
            device=device,
            prediction=Prediction(question, options, fastest_length),
        )
    )
