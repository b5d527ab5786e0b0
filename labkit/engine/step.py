"""One step of a Llama-family model, written out: every op that `labkit.roofline` counts, in its order.

It runs the modules of a `transformers` model, a quantized linear among them, but it builds no masks it does not need,
repeats no K or V, and looks nothing up between two ops, which on a small model is a third of the time. `mark(name)` is
called after each op, and once before the first: that is where `labkit.engine.op_times` puts its clock.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kernels import dense_linear
from labkit.kv_cache.interface import DecoderCache, StepInput
from labkit.quantization import QuantLinear

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def no_mark(name: str) -> None:
    """The mark of a step that nobody clocks."""


def check_model(model: object) -> PreTrainedModel:
    """Refuse what this step does not compute exactly."""
    _check.require(isinstance(model, PreTrainedModel), "model", type(model).__name__, "a transformers causal LM")
    config = model.config
    _check.require(config.model_type in FAMILIES, "model", config.model_type, f"a model of {', '.join(FAMILIES)}")
    complete = hasattr(model, "model") and hasattr(model, "lm_head")
    _check.require(complete, "model", type(model).__name__, "a causal LM, with its lm_head")
    device = model.device
    _check.require(device.type in ("cpu", "cuda"), "model", f"weights on {device}", "a model on the CPU or a GPU")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    _check.require(rope in ("default", "linear", "llama3"), "model", f"rope_type {rope!r}", "default, linear or llama3")
    _check.require(config.hidden_act == "silu", "model", f"hidden_act {config.hidden_act!r}", "silu")
    sliding = any(kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ())
    mistral = config.model_type == "mistral" and getattr(config, "sliding_window", None)
    _check.require(not sliding and not mistral, "model", "sliding-window attention", "full attention")
    return model


Projection = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerOps:
    """What one decoder layer applies, looked up once; `q_norm` and `k_norm` are None where the family has none."""

    input_norm: Projection
    q_proj: Projection
    k_proj: Projection
    v_proj: Projection
    q_norm: Projection | None
    k_norm: Projection | None
    o_proj: Projection
    post_norm: Projection
    gate_proj: Projection
    up_proj: Projection
    down_proj: Projection


@dataclass(frozen=True, slots=True)
class StepOps:
    """What one step of a model applies; `head_dim` splits the projections into heads."""

    embed: Projection
    layers: tuple[LayerOps, ...]
    final_norm: Projection
    lm_head: Projection
    head_dim: int


def _linear(module: nn.Module) -> Projection:
    """A plain `nn.Linear` runs at memory speed for few rows; anything else runs its own forward, or what it binds."""
    if type(module) is nn.Linear:
        return functools.partial(dense_linear, weight=module.weight, bias=module.bias)
    return module.projection() if isinstance(module, QuantLinear) else module


def _rms_norm(module: nn.Module) -> Projection:
    """RMSNorm (Zhang and Sennrich, 2019, equation 4) over the last dimension."""
    weight, eps = module.weight, module.variance_epsilon
    return functools.partial(F.rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)


def collect_ops(model: PreTrainedModel) -> StepOps:
    """The modules of a model, in the order that a step applies them."""
    layers = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        has_norms = hasattr(attention, "q_norm")
        layers.append(
            LayerOps(
                input_norm=_rms_norm(layer.input_layernorm),
                q_proj=_linear(attention.q_proj),
                k_proj=_linear(attention.k_proj),
                v_proj=_linear(attention.v_proj),
                q_norm=_rms_norm(attention.q_norm) if has_norms else None,
                k_norm=_rms_norm(attention.k_norm) if has_norms else None,
                o_proj=_linear(attention.o_proj),
                post_norm=_rms_norm(layer.post_attention_layernorm),
                gate_proj=_linear(mlp.gate_proj),
                up_proj=_linear(mlp.up_proj),
                down_proj=_linear(mlp.down_proj),
            )
        )
    body = model.model
    head_dim = body.layers[0].self_attn.head_dim
    return StepOps(body.embed_tokens, tuple(layers), _rms_norm(body.norm), _linear(model.lm_head), head_dim)


Mark = Callable[[str], None]


def _attention_block(
    layer: LayerOps, layer_idx: int, x: torch.Tensor, head_dim: int, at: StepInput, cache: DecoderCache, mark: Mark
) -> torch.Tensor:
    heads = (*x.shape[:2], -1, head_dim)
    query = layer.q_proj(x).view(heads)
    mark("q_proj")
    key = layer.k_proj(x).view(heads)
    mark("k_proj")
    value = layer.v_proj(x).view(heads)
    mark("v_proj")
    num_heads = query.shape[2]
    if layer.q_norm is not None:
        query, key = layer.q_norm(query), layer.k_norm(key)
    # Queries and keys turn together: half the kernels of turning each.
    both = torch.cat((query, key), dim=2)
    both = torch.addcmul(both * at.cos, both.roll(head_dim // 2, -1), at.sin).transpose(1, 2)
    mark("rope")
    cache.write(layer_idx, both[:, num_heads:], value.transpose(1, 2), at)
    mark("kv_write")
    x = cache.attend(layer_idx, both[:, :num_heads], at).transpose(1, 2).flatten(2)
    mark("attention")
    x = layer.o_proj(x)
    mark("o_proj")
    return x


def _mlp_block(layer: LayerOps, x: torch.Tensor, mark: Mark) -> torch.Tensor:
    gate = layer.gate_proj(x)
    mark("gate_proj")
    up = layer.up_proj(x)
    mark("up_proj")
    x = F.silu(gate) * up
    mark("act_mul")
    x = layer.down_proj(x)
    mark("down_proj")
    return x


def _last(hidden: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` rows, in strides of their own: with those of a longer tensor, even of one row, a 16-bit product
    on a CPU copies its whole weight first."""
    if count == hidden.shape[1]:
        return hidden
    return hidden[:, -count:].clone(memory_format=torch.contiguous_format)


def run_step(
    ops: StepOps,
    tokens: torch.Tensor,
    at: StepInput,
    cache: DecoderCache,
    *,
    logits_to_keep: int | None = None,
    mark: Mark = no_mark,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(batch, kept, vocab)` of the last `logits_to_keep` tokens (all by default), and the hidden states
    `(batch, q_len, hidden_size)` behind them, after the final norm. `tokens (batch, q_len)`; K and V go to the cache.
    """
    mark("begin")
    x = ops.embed(tokens)
    mark("embed")
    for layer_idx, layer in enumerate(ops.layers):
        h = layer.input_norm(x)
        mark("input_norm")
        x = x + _attention_block(layer, layer_idx, h, ops.head_dim, at, cache, mark)
        mark("attn_residual")
        h = layer.post_norm(x)
        mark("post_norm")
        x = x + _mlp_block(layer, h, mark)
        mark("mlp_residual")
    hidden = ops.final_norm(x)
    mark("final_norm")
    logits = ops.lm_head(hidden if logits_to_keep is None else _last(hidden, logits_to_keep))
    mark("lm_head")
    return logits, hidden
