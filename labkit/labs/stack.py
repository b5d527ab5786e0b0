"""The lab of chapter 06: rungs on and off, and the stack of those that are on measured again beside its baseline."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.engine.ladder import POPULAR, RUNGS
from labkit.labs._flash_attention_forms import times
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._spec import LabSpec
from labkit.labs._stack_compute import StackCompute
from labkit.labs._stack_figure import build_figure, draw
from labkit.labs._stack_forms import names
from labkit.labs._stack_models import Stacks
from labkit.labs._stack_result import MOST_DRAFTED, StackParams, StackResult
from labkit.labs._stack_rungs import RungToggles
from labkit.measure import device_name
from labkit.models import LoadedModel

_DEFAULT_RUNGS, _DEFAULT_DRAFTED = ("step", "bfloat16", "int4"), 2
_PROMPTS = {"a short chat prompt": "chat", "a long prompt": "long"}

_HOW = (
    "Turn rungs on and off: the set is put together for real, and it and the baseline continue the prompt in turn. A "
    "row below is a set: its rungs, its tokens a second under the ceiling of its bytes, and its memory. Hollow: what "
    "the popular ladder says of the same set. A rung that does not go with the others is left out, and says why."
)


def everything(results: Sequence[StackResult]) -> str | None:
    """What the latest setting with every rung asked for gave, on whatever prompt; None while there is none."""
    for last in reversed(results):
        if last.params.rungs == tuple(RUNGS) and last.speedup:
            left = f", without {' and '.join(RUNGS[rung].title for rung in last.left_out)}" if last.left_out else ""
            return f"{times(last.speedup)} ({names(last.effective, last.gamma)}{left}). {_of_popular(last)}"
    return None


def _of_popular(result: StackResult) -> str:
    told = POPULAR[-1].speed
    return f"The popular ladder says {times(told)}: {times(told / result.speedup)} as much."


def stack_lab(model: str | LoadedModel = "smollm2-135m", *, device: torch.device | str | None = None) -> Lab:
    """A lab over the rungs of chapter 06's ladder: which of them are on, after which prompt, with how long a draft.

    `model` is what `load_model` takes, or a loaded model on `device`; the course's trained head drafts for the default
    model, a lookup in the prompt for others. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    stacks = Stacks(model, device)
    start = tuple(rung for rung in _DEFAULT_RUNGS if rung not in stacks.refused(_DEFAULT_RUNGS))
    wide = {"description_width": "initial"}
    drafted = widgets.SelectionSlider(
        options=tuple(range(1, MOST_DRAFTED + 1)),
        value=_DEFAULT_DRAFTED,
        description="Draft length γ",
        continuous_update=False,
        layout={"width": "300px"},
        style=wide,
    )
    question = "All rungs on: how many times as fast as the baseline? The popular ladder says 8."
    return Lab(
        LabSpec(
            name="stack_lab",
            title=f"What do the rungs come to together? {name} on {device_name(device)}",
            how=_HOW,
            knobs={
                "rungs": RungToggles(start, stacks.refused),
                "prompt": widgets.Dropdown(
                    options=list(_PROMPTS.items()), value="chat", description="After", layout={"width": "260px"}
                ),
                "num_assistant_tokens": drafted,
            },
            params=lambda **values: StackParams(model=name, **values),
            compute=StackCompute(stacks),
            figure=build_figure,
            draw=draw,
            device=device,
            prediction=Prediction(question, ("under 2x", "2x to 4x", "4x to 6x", "6x to 8x", "over 8x"), everything),
        )
    )
