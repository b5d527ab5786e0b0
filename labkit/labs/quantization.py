"""The lab of chapter 02: bits, group size and method; error by layer, bytes, perplexity, tokens per second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._quantization_compute import QuantizationCompute
from labkit.labs._quantization_figure import build_figure, draw
from labkit.labs._quantization_forms import plain
from labkit.labs._quantization_models import LEFT_ALONE, fitting_group_sizes, load_once
from labkit.labs._quantization_result import METHODS, QuantizationParams, QuantizationResult
from labkit.labs._spec import LabSpec
from labkit.measure import device_name
from labkit.models import LoadedModel, list_models, model_config
from labkit.quantization.plan import plan

_BITS = (2, 3, 4, 8)
_DEFAULT_GROUP = 64
# Bits and group size of the two settings that the question compares: nearly the same bytes.
_SMALL_GROUPS, _MORE_BITS = (3, 16), (4, 64)

_HOW = (
    "Move a slider: every matrix is packed for real. Above: how far each one's output is from the float model's. "
    "Below: perplexity over the bits that are stored, and decoding under what reading those bytes allows. "
    "RTN is measured whole. AWQ and GPTQ run live on one layer; their perplexity over the whole model is RECORDED."
)


def _slider(description: str, options: Sequence[object], value: object) -> widgets.SelectionSlider:
    width = {"width": "270px"}
    style = {"description_width": "60px"}
    return widgets.SelectionSlider(
        options=options, value=value, description=description, continuous_update=False, layout=width, style=style
    )


def _group_sizes(model: str | LoadedModel, device: torch.device) -> tuple[int, ...]:
    """Those that divide every matrix of the model; one that is not in the catalogue is loaded to find out."""
    if isinstance(model, str) and model in list_models():
        config = model_config(model)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return fitting_group_sizes(
            {config.hidden_size, config.intermediate_size, config.num_attention_heads * head_dim}
        )
    loaded = load_once(model, device) if isinstance(model, str) else model
    return fitting_group_sizes({linear.in_features for linear in plan(loaded.model, LEFT_ALONE).linears.values()})


def groups_or_bits(results: Sequence[QuantizationResult]) -> str | None:
    """What the latest of both settings of the question, measured under RTN, say; None while one is missing."""
    found = {(r.params.bits, r.params.group_size): r for r in results if r.params.method == "RTN" and r.quality}
    if not found.keys() >= {_SMALL_GROUPS, _MORE_BITS}:
        return None
    groups, bits = found[_SMALL_GROUPS], found[_MORE_BITS]
    said = [
        f"{r.params.bits} bits in groups of {r.params.group_size} store {r.sizes.bits_per_weight:.4g} bits a weight "
        f"and give perplexity {plain(r.quality.perplexity)}"
        for r in (groups, bits)
    ]
    return f"{said[0]}; {said[1]} (float: {plain(bits.quality.baseline)})."


def quantization_lab(
    model: str | LoadedModel = "smollm2-135m",
    *,
    device: torch.device | str | None = None,
    text: str | Path | None = None,
) -> Lab:
    """A lab over bits, group size and method: what packing a model's matrices costs in quality and saves in bytes.

    `model` is what `load_model` takes, or a loaded model on `device`; `text`, a path or a string, is evaluated in place
    of the course's text. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    sizes = _group_sizes(model, device)
    options = [("row" if size == -1 else str(size), size) for size in sizes]
    knobs = {
        "bits": _slider("Bits", _BITS, 4),
        "group_size": _slider("Group", options, _DEFAULT_GROUP if _DEFAULT_GROUP in sizes else -1),
        "method": _slider("Method", METHODS, "RTN"),
    }
    question = "Round to nearest: 3 bits in groups of 16, or 4 bits in groups of 64?"
    answers = ("3 bits: smaller and better", "3 bits: smaller, not better", "4 bits: smaller and better")
    return Lab(
        LabSpec(
            name="quantization_lab",
            title=f"What does a bit buy? {name} on {device_name(device)}",
            how=_HOW,
            knobs=knobs,
            params=lambda **values: QuantizationParams(model=name, **values),
            compute=QuantizationCompute(model, device, text),
            figure=build_figure,
            draw=draw,
            device=device,
            prediction=Prediction(question, answers, groups_or_bits),
        )
    )
