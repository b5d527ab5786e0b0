"""Fewer KV heads in a model that was trained with more: a smaller cache, and what that costs."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress as progress_bar
from labkit.attention._merge_walk import Settings, merged_layers
from labkit.models import LoadedModel, plain_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PARTS = {"both": ("keys", "values"), "keys": ("keys",), "values": ("values",)}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class MergeReport:
    """What was merged. method: "mean", "calibrated" or "fitted". layer_errors: of each layer's attention on the
    calibration text, mean squared error over the original output's mean square; empty without one. bytes_per_token:
    of the KV cache in the model's dtype, before and after; alike where only keys or only values were merged."""

    method: str
    merge: str
    num_key_value_heads_before: int
    num_key_value_heads: int
    bytes_per_token_before: int
    bytes_per_token: int
    layer_errors: tuple[float, ...]
    seconds: float

    def __str__(self) -> str:
        saved = f"{self.bytes_per_token_before:,} to {self.bytes_per_token:,} bytes a token"
        heads = f"{self.num_key_value_heads_before} KV heads to {self.num_key_value_heads}"
        return f"{heads} ({self.merge}, {self.method}): {saved}, {self.seconds:.0f} s"


@torch.inference_mode(False)  # whose tensors could never be trained, nor fitted here
def merge_kv_heads_(
    model: PreTrainedModel | LoadedModel,
    num_key_value_heads: int,
    *,
    calibration: Tensor | None = None,
    fit_steps: int = 0,
    merge: str = "both",
    slow_turn: float = 2.0,
    ridge: float = 0.1,
    learning_rate: float = 1e-3,
    progress: bool = True,
) -> MergeReport:
    """Merge the KV heads of a Llama-family model in place: k_proj, v_proj and the cache shrink by the same factor.

    Without calibration: each new head is the mean of the old heads of its group (Ainslie et al. 2023, GQA, section
    2.1), which that paper trains on for a twentieth of the pretraining; at once the model is hardly one any more.
    calibration: token ids `(n_samples, seq_len)`. Then a query head reads the shared key and value through a matrix of
    its own, absorbed into q_proj and o_proj, both chosen on that text (`labkit.attention._shared_heads`), and o_proj is
    solved for again; layer by layer, each on what the merged layers before it give.
    fit_steps: then so many steps of Adam on each layer's four matrices towards the original attention's output, each on
    one sample, at `learning_rate`; with few samples it learns those by heart (measured on smollm2-135m: 24 steps on 8
    samples of 512 tokens end with a higher loss than without). slow_turn: rotary pairs that turn by less than this, in
    radians, over a whole sample are merged as if they did not turn: on texts much longer than the samples that gets
    worse. ridge: how far the new o_proj is held back, of the mean energy of what it reads.
    merge: "keys" or "values" merges only those, to see what each costs. The module then keeps the old number of heads,
    with copies of the shared ones, so that no bytes are saved in weights or cache.

    Matrices are replaced, never written into, so a `shared_copy` leaves its original alone; a `Decoder` is to be made
    anew. Errors: ValueError for a number that does not divide or is not smaller, for a quantized model and for one of
    another family; the model is then as it was, and so it is after an interrupt.
    """
    plain = plain_model(model)
    settings = _checked(plain, num_key_value_heads, merge, slow_turn, ridge, fit_steps, learning_rate)
    ids = None if calibration is None else _calibration_of(plain, calibration)
    takes = "0 without calibration, and where only keys or only values are merged: copies would part"
    _check.require(not fit_steps or (ids is not None and merge == "both"), "fit_steps", fit_steps, takes)
    begin, before = time.perf_counter(), plain.config.num_key_value_heads
    if ids is None:
        method, errors = "mean", []
        made = [_mean_pooled(layer.self_attn, before, settings) for layer in plain.model.layers]
    else:
        method = "fitted" if fit_steps else "calibrated"
        bar = progress_bar("merging KV heads", len(plain.model.layers), "layers")
        with bar if progress else contextlib.nullcontext(lambda _: None) as update:
            found, errors = merged_layers(plain, ids, settings, update)
        made = [{name: getattr(attention, name) for name in _PROJECTIONS} for attention in found]
    bytes_before = _bytes_per_token(plain)
    _install(plain, made, before if merge != "both" else num_key_value_heads)
    seconds = time.perf_counter() - begin
    after = _bytes_per_token(plain)
    return MergeReport(method, merge, before, num_key_value_heads, bytes_before, after, tuple(errors), seconds)


def _checked(
    model: object,
    num_key_value_heads: int,
    merge: str,
    slow_turn: float,
    ridge: float,
    fit_steps: int,
    learning_rate: float,
) -> Settings:
    takes = f"a causal LM of {', '.join(FAMILIES)}"
    _check.require(isinstance(model, PreTrainedModel), "model", type(model).__name__, takes)
    _check.require(model.config.model_type in FAMILIES, "model", model.config.model_type, takes)
    _check.require(hasattr(model, "model") and hasattr(model.model, "layers"), "model", type(model).__name__, takes)
    done = [name for name, module in model.named_modules() if getattr(module, "is_quantized", False)]
    attentions = [layer.self_attn for layer in model.model.layers]
    whole = all(type(getattr(a, name)) is nn.Linear for a in attentions for name in _PROJECTIONS)
    _check.require(
        not done and whole, "model", "quantized or replaced matrices", "plain matrices: merge, then quantize"
    )
    now = model.config.num_key_value_heads
    heads = _check.integer("num_key_value_heads", num_key_value_heads, 1)
    takes = f"a divisor of the model's {now} KV heads that is smaller"
    _check.require(heads < now and now % heads == 0, "num_key_value_heads", heads, takes)
    _check.choice("merge", merge, tuple(PARTS))
    slow_turn, ridge = _check.number("slow_turn", slow_turn, 0.0), _check.number("ridge", ridge, 0.0)
    fit_steps = _check.integer("fit_steps", fit_steps, 0)
    rate = _check.number("learning_rate", learning_rate, 0.0, 1.0)
    return Settings(heads, PARTS[merge], slow_turn, ridge, fit_steps, rate)


def _calibration_of(model: PreTrainedModel, calibration: object) -> Tensor:
    takes = "None: a norm between the projection and the rotation keeps a matrix from being absorbed"
    normed = model.config.model_type == "qwen3"
    _check.require(not normed, "calibration", "token ids for a model that norms its keys", takes)
    return check_ids(model, calibration)


def check_ids(model: PreTrainedModel, calibration: object) -> Tensor:
    """Refuse what is not token ids `(n_samples, seq_len)` of the model's vocabulary."""
    ids = _check.tensor("calibration", calibration, ndim=2, dtypes=(torch.int64, torch.int32))
    shape = tuple(ids.shape)
    takes = "token ids (n_samples, seq_len) of at least two tokens"
    _check.require(ids.numel() >= 2 and shape[1] >= 2, "calibration", f"shape {shape}", takes)
    low, high = int(ids.min()), int(ids.max())
    takes = f"ids from 0 to {model.config.vocab_size - 1}"
    _check.require(low >= 0 and high < model.config.vocab_size, "calibration", f"ids from {low} to {high}", takes)
    return ids


def _pooled(linear: nn.Linear, heads: int, groups: int, copies: int) -> nn.Linear:
    """The mean over the consecutive heads of each group, `copies` times."""

    def mean(tensor: Tensor) -> Tensor:
        rows = tensor.detach().float().unflatten(0, (groups, heads // groups, -1)).mean(1)
        return rows.repeat_interleave(copies, 0).flatten(0, 1)

    rows = linear.out_features * groups * copies // heads
    made = nn.Linear(linear.in_features, rows, bias=linear.bias is not None, device=linear.weight.device)
    with torch.no_grad():
        made.weight.copy_(mean(linear.weight))
        if linear.bias is not None:
            made.bias.copy_(mean(linear.bias))
    return made


def _mean_pooled(attention: nn.Module, heads: int, settings: Settings) -> dict[str, nn.Linear]:
    groups = settings.num_key_value_heads
    copies = 1 if len(settings.parts) == 2 else heads // groups
    names = {"keys": "k_proj", "values": "v_proj"}
    return {names[part]: _pooled(getattr(attention, names[part]), heads, groups, copies) for part in settings.parts}


def _install(model: PreTrainedModel, made: list[dict[str, nn.Linear]], num_key_value_heads: int) -> None:
    """Put the new matrices in, in the dtype of the old, and have config and modules say how many heads there are."""
    for layer, linears in zip(model.model.layers, made, strict=True):
        attention = layer.self_attn
        for name, linear in linears.items():
            old = getattr(attention, name).weight
            setattr(attention, name, linear.to(old.dtype).requires_grad_(old.requires_grad).train(attention.training))
        attention.num_key_value_groups = model.config.num_attention_heads // num_key_value_heads
        if hasattr(attention, "num_key_value_heads"):
            attention.num_key_value_heads = num_key_value_heads
    model.config.num_key_value_heads = num_key_value_heads


def _bytes_per_token(model: PreTrainedModel) -> int:
    """What a token's keys and values take, by what the layers' matrices give."""
    attentions = [layer.self_attn for layer in model.model.layers]
    return sum((a.k_proj.out_features + a.v_proj.out_features) * a.k_proj.weight.itemsize for a in attentions)
