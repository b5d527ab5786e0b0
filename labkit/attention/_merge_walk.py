"""A whole model merged layer by layer: each layer on what the merged layers before it give, towards the original's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.attention._shared_heads import shared_key, shared_value
from labkit.attention.multi_head import MultiHeadAttention

# Windows whose attention is computed at once.
_AT_ONCE = 4


@dataclass(frozen=True)
class Settings:
    """`merge_kv_heads_`'s arguments, checked."""

    num_key_value_heads: int
    parts: tuple[str, ...]
    slow_turn: float
    ridge: float
    fit_steps: int
    learning_rate: float


Update = Callable[[int], None]


@torch.no_grad()
def merged_layers(
    model: PreTrainedModel, ids: Tensor, settings: Settings, update: Update
) -> tuple[list[MultiHeadAttention], list[float]]:
    """A merged attention for each layer, in float32, and its error: mean square over that of the original's output.

    `ids (n_samples, seq_len)`. Only the two streams of hidden states are kept, that of the original and that of the
    model merged so far. The target is what the original's attention gives in its own stream.
    """
    body = model.model
    original = body.embed_tokens(ids.to(model.device))
    merged = original.clone()
    found, errors = [], []
    for index, layer in enumerate(body.layers):
        old = MultiHeadAttention.from_llama(layer.self_attn, body.rotary_emb).float()
        x, moved = (layer.input_layernorm(stream).float() for stream in (original, merged))
        target = _in_pieces(old, x)
        new = _closed_form(old, moved, settings, ids.shape[1])
        _refit_output(new, moved, target, settings.ridge)
        if settings.fit_steps:
            _fit(new, moved, target, settings)
        out = _in_pieces(new, moved)
        errors.append(((out - target).square().mean() / target.square().mean()).item())
        found.append(new)
        original, merged = _behind(layer, original, target), _behind(layer, merged, out)
        update(index + 1)
    return found, errors


def _behind(layer: nn.Module, hidden: Tensor, attended: Tensor) -> Tensor:
    """What leaves a layer, from what enters it and what its attention adds."""
    hidden = hidden + attended.to(hidden.dtype)
    return torch.cat([part + layer.mlp(layer.post_attention_layernorm(part)) for part in hidden.split(_AT_ONCE)])


def _in_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cat([function(part) for part in x.split(_AT_ONCE)])


def _matrix(linear: nn.Linear) -> Tensor:
    """float64, with its bias as a last column."""
    bias = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
    return torch.cat((linear.weight, bias[:, None]), dim=1).double()


def _put(linear: nn.Linear, matrix: Tensor) -> None:
    linear.weight.copy_(matrix[:, :-1])
    if linear.bias is not None:
        linear.bias.copy_(matrix[:, -1])


def _closed_form(old: MultiHeadAttention, x: Tensor, settings: Settings, seq_len: int) -> MultiHeadAttention:
    """`old` with fewer KV heads; if only keys or values are merged, copies of the shared head in the old places."""
    groups, parts = settings.num_key_value_heads, settings.parts
    tokens = F.pad(x.flatten(0, 1), (0, 1), value=1.0).double()
    moments = tokens.mT @ tokens / len(tokens)
    # A KV head's queries, keys, values and columns of o_proj, by new group and old head.
    per_old = old.num_attention_heads // old.num_key_value_heads
    queries = _matrix(old.q_proj).view(groups, -1, per_old, old.head_dim, old.hidden_size + 1)
    keys, values = (_matrix(p).view(groups, -1, old.head_dim, old.hidden_size + 1) for p in (old.k_proj, old.v_proj))
    outputs = old.o_proj.weight.double().view(old.hidden_size, groups, -1, per_old, old.head_dim).permute(1, 2, 3, 0, 4)
    if "keys" in parts:
        slow_below = settings.slow_turn / seq_len
        pairs = [
            shared_key(q, k, moments, old.rotary.frequencies, slow_below) for q, k in zip(queries, keys, strict=True)
        ]
        queries, keys = torch.stack([q for q, _ in pairs]), torch.stack([k for _, k in pairs])[:, None]
    if "values" in parts:
        pairs = [shared_value(v, out, moments) for v, out in zip(values, outputs, strict=True)]
        values, outputs = torch.stack([v for v, _ in pairs])[:, None], torch.stack([o for _, o in pairs])
    new = _like(old, groups if len(parts) == 2 else old.num_key_value_heads)
    _put(new.q_proj, queries.reshape(-1, old.hidden_size + 1))
    for linear, heads in ((new.k_proj, keys), (new.v_proj, values)):
        copies = linear.out_features // (heads.shape[0] * heads.shape[1] * old.head_dim)
        _put(linear, heads.flatten(0, 1).repeat_interleave(copies, 0).flatten(0, 1))
    new.o_proj.weight.copy_(outputs.permute(3, 0, 1, 2, 4).reshape(old.hidden_size, -1))
    if new.o_proj.bias is not None:
        new.o_proj.bias.copy_(old.o_proj.bias)
    return new


def _like(old: MultiHeadAttention, num_key_value_heads: int) -> MultiHeadAttention:
    return MultiHeadAttention(
        old.hidden_size,
        old.num_attention_heads,
        num_key_value_heads,
        old.head_dim,
        rotary=old.rotary,
        bias=old.q_proj.bias is not None,
        out_bias=old.o_proj.bias is not None,
        device=old.q_proj.weight.device,
    ).requires_grad_(False)


def _refit_output(new: MultiHeadAttention, x: Tensor, target: Tensor, ridge: float) -> None:
    """o_proj by least squares on what the merged heads see, kept near what it is by `ridge` times the mean energy."""
    seen = _in_pieces(new.attend, x).flatten(0, 1).double()
    left = target.flatten(0, 1).double() - new.o_proj(seen.float()).double()
    moments = seen.mT @ seen
    moments.diagonal().add_(ridge * moments.diagonal().mean())
    new.o_proj.weight.add_(torch.linalg.solve(moments, seen.mT @ left).mT)


@torch.enable_grad()
def _fit(new: MultiHeadAttention, x: Tensor, target: Tensor, settings: Settings) -> None:
    """Adam on all weights of the layer, a window a step, towards the original's output."""
    scale, parameters = target.square().mean(), list(new.requires_grad_(True).parameters())
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    for step in range(settings.fit_steps):
        warm = min(1.0, (step + 1) / 5)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / settings.fit_steps))
        window = step % len(x)
        loss = (new(x[window : window + 1]) - target[window : window + 1]).square().mean() / scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    new.requires_grad_(False)
