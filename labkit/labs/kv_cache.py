"""The lab of chapter 03: sequence length, KV heads and bits; bytes of the cache, time to attend to it, perplexity."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.kv_cache import bits_per_value
from labkit.labs._frame import Lab
from labkit.labs._kv_cache_compute import KVCacheCompute
from labkit.labs._kv_cache_figure import build_figure, draw
from labkit.labs._kv_cache_forms import times
from labkit.labs._kv_cache_result import BITS, FULL, SEQ_LENS, KVCacheParams, KVCacheResult
from labkit.labs._prediction import Prediction
from labkit.labs._quantization_models import load_once
from labkit.labs._result import si
from labkit.labs._spec import LabSpec
from labkit.measure import device_name
from labkit.models import LoadedModel, list_models, model_config
from labkit.sizing import LlamaShape

_DEFAULT_LEN = 4096
_ASKED_BITS = 4
_MOST_GROUP, _RECENT = 32, 32

_HOW = (
    "Move a slider: a cache of that many tokens is allocated, its bytes are counted beside the formula's, and one "
    "layer's decode attention is clocked over it beside the least time that memory allows. Perplexity is MEASURED "
    "through the cache for the model's own KV heads; for others a model has to be merged or trained: RECORDED."
)


def _slider(description: str, options: Sequence[object], value: object) -> widgets.SelectionSlider:
    width = {"width": "280px"}
    style = {"description_width": "75px"}
    return widgets.SelectionSlider(
        options=options, value=value, description=description, continuous_update=False, layout=width, style=style
    )


def _shape(model: str | LoadedModel, device: torch.device) -> LlamaShape:
    """Of the model; one that is not in the catalogue is loaded to find out."""
    if isinstance(model, str) and model in list_models():
        return LlamaShape.of(model_config(model))
    return LlamaShape.of((load_once(model, device) if isinstance(model, str) else model).model.config)


def head_options(shape: LlamaShape) -> tuple[int, ...]:
    """The numbers of KV heads that the query heads can be shared among, from one each (MHA) to one for all (MQA)."""
    count = shape.num_attention_heads
    return tuple(n for n in range(count, 0, -1) if count % n == 0)


def group_size(head_dim: int) -> int:
    """The largest power of two up to 32 that divides a head."""
    return next(size for size in (_MOST_GROUP, 16, 8, 4, 2, 1) if head_dim % size == 0)


def how_many_times(results: Sequence[KVCacheResult], own: int) -> str | None:
    """What the latest pair of the question's two settings, of one length, says; None while there is no such pair."""
    found: dict[int, dict[tuple[int, int], KVCacheResult]] = {}
    asked, answer = ((own, FULL), (1, _ASKED_BITS)), None
    for result in results:
        pair = found.setdefault(result.params.seq_len, {})
        pair[result.params.num_key_value_heads, result.params.bits] = result
        if all(key in pair for key in asked):
            answer = _compared(*(pair[key] for key in asked))
    return answer


def _compared(large: KVCacheResult, small: KVCacheResult) -> str:
    params, sizes = small.params, (large.sizes.total, small.sizes.total)
    return (
        f"{times(sizes[0] / sizes[1])} ({si(sizes[0], 'B')} to {si(sizes[1], 'B')} at {params.seq_len:,} tokens). "
        f"Heads give {large.params.num_key_value_heads}x; bits give 16/{params.bits_per_value:g}, since each group "
        f"brings a scale and a minimum; {small.sizes.recent_tokens} recent tokens stay in 16 bits."
    )


def _prediction(own: int, group: int) -> Prediction:
    naive, true = own * FULL / _ASKED_BITS, own * FULL / bits_per_value(_ASKED_BITS, group)
    options = (times(own + FULL / _ASKED_BITS), times(true), times(naive))
    heads = f"From {own} KV heads to 1 and from" if own > 1 else "From"
    question = f"{heads} 16 bits to {_ASKED_BITS} (groups of {group}): how many times smaller is the cache?"
    return Prediction(question, options, lambda results: how_many_times(results, own))


def kv_cache_lab(model: str | LoadedModel = "smollm2-135m", *, device: torch.device | str | None = None) -> Lab:
    """A lab over sequence length, KV heads and bits: what a KV cache weighs, takes to read, and loses by rounding.

    `model` is what `load_model` takes, or a loaded model on `device`. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    _check.require(isinstance(model, str | LoadedModel), "model", model, "a model's name or a LoadedModel")
    name = model if isinstance(model, str) else model.name
    shape = _shape(model, device)
    options, own, group = head_options(shape), shape.num_key_value_heads, group_size(shape.head_dim)
    lengths = [(f"{length:,}", length) for length in SEQ_LENS]
    knobs = {
        "seq_len": _slider("Tokens", lengths, _DEFAULT_LEN),
        "num_key_value_heads": _slider("KV heads", options, own),
        "bits": _slider("Bits", BITS, FULL),
    }
    return Lab(
        LabSpec(
            name="kv_cache_lab",
            title=f"What does a KV cache weigh? {name} on {device_name(device)}",
            how=_HOW,
            knobs=knobs,
            params=lambda **values: KVCacheParams(q_group_size=group, residual_length=_RECENT, model=name, **values),
            compute=KVCacheCompute(model, device),
            figure=functools.partial(build_figure, options),
            draw=functools.partial(draw, options=options),
            device=device,
            prediction=_prediction(own, group),
        )
    )
