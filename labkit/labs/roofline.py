"""The lab of chapter 01: what bounds a decode step and a prefill, by batch, sequence length and dtype."""

from collections.abc import Sequence

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.hardware import describe, measured_dtypes
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._roofline_compute import RooflineCompute
from labkit.labs._roofline_figure import build_figure, draw
from labkit.labs._roofline_result import RooflineParams, RooflineResult
from labkit.labs._spec import LabSpec
from labkit.measure import device_name
from labkit.models import LoadedModel

_BATCHES = [2**i for i in range(7)]
_SEQ_LENS = [2**i for i in range(4, 12)]
_ASKED_BATCH = 8

_HOW = (
    "Move a slider: one decode step and one prefill run for real, and every op is clocked. "
    "Left: memory sets the pace under the slanted roof, arithmetic under the flat one. "
    "Right: where the time goes, beside the least that the roof allows. "
    "Times are MEASURED now; bytes and FLOPs are MODELLED."
)


def _slider(description: str, options: Sequence[object], value: object) -> widgets.SelectionSlider:
    width = {"width": "270px"}
    style = {"description_width": "60px"}
    return widgets.SelectionSlider(
        options=options, value=value, description=description, continuous_update=False, layout=width, style=style
    )


def batch_answer(results: Sequence[RooflineResult]) -> str | None:
    """What the latest pair of batch 1 and batch 8, alike in all else, says; None while there is no such pair."""
    speeds: dict[tuple[int, str], dict[int, float]] = {}
    answer = None
    for result in results:
        params = result.params
        pair = speeds.setdefault((params.seq_len, params.dtype), {})
        pair[params.batch] = result.decode.tokens_per_second
        if 1 in pair and _ASKED_BATCH in pair and params.batch in (1, _ASKED_BATCH):
            one, many = pair[1], pair[_ASKED_BATCH]
            answer = (
                f"{many / one:.1f}x ({one:.3g} to {many:.3g} tokens/s at context {params.seq_len}, {params.dtype}). "
                f"A step for {_ASKED_BATCH} took {_ASKED_BATCH * one / many:.1f} times as long as a step for one."
            )
    return answer


def roofline_lab(model: str | LoadedModel = "smollm2-135m", *, device: torch.device | str | None = None) -> Lab:
    """A lab over batch, sequence length and dtype: each op of a decode and a prefill step under the measured roof.

    `model` is what `load_model` takes, or a loaded model on `device`. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    dtypes = [str(dtype).removeprefix("torch.") for dtype in measured_dtypes(device)]
    knobs = {
        "batch": _slider("Batch", _BATCHES, 1),
        "seq_len": _slider("Context", _SEQ_LENS, 128),
        "dtype": _slider("dtype", dtypes, "bfloat16" if device.type == "cuda" else "float32"),
    }
    where = device_name(device)
    if device.type == "cpu":
        where += f", {torch.get_num_threads()} of {describe(device).cores} cores"
    options = ("1x", "2x", "4x", "8x")
    question = f"From batch 1 to batch {_ASKED_BATCH}, tokens per second of decode grow how many times?"
    return Lab(
        LabSpec(
            name="roofline_lab",
            title=f"What bounds a step? {name} on {where}",
            how=_HOW,
            knobs=knobs,
            params=lambda **values: RooflineParams(model=name, **values),
            compute=RooflineCompute(model, device),
            figure=build_figure,
            draw=draw,
            device=device,
            prediction=Prediction(question, options, batch_answer),
        )
    )
