"""What a layer attends to: which keys each query may see, where its tokens stand, and attention over shared heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache

from labkit import _check


@dataclass(frozen=True)
class Context:
    """One call's `q_len` tokens on a past of `past`. positions `(batch or 1, q_len)`: of a row's token, counted over
    what is not padding; kv_len: slots that the cache will return. allowed, bool `(batch or 1, 1, q_len, kv_len)`: what
    a query may see, or None where the plain causal mask (or none, for one query) says it all."""

    past: int
    kv_len: int
    positions: Tensor
    allowed: Tensor | None

    @property
    def q_len(self) -> int:
        return self.positions.shape[1]


def check_hidden(hidden_states: object, hidden_size: int, weight: Tensor) -> Tensor:
    """Refuse what is not `(batch, q_len, hidden_size)` in the dtype and on the device of the weights."""
    x = _check.tensor("hidden_states", hidden_states, ndim=3, dtypes=(weight.dtype,))
    shape, takes = tuple(x.shape), f"(batch, q_len, {hidden_size}), at least one token"
    _check.require(shape[2] == hidden_size and x.numel() > 0, "hidden_states", f"shape {shape}", takes)
    _check.require(x.device == weight.device, "hidden_states", f"a tensor on {x.device}", f"one on {weight.device}")
    return x


def check_cache(past_key_values: object, layer_idx: int) -> Cache | None:
    """Refuse what is no cache of transformers."""
    takes = "a transformers.Cache, or None"
    ok = past_key_values is None or isinstance(past_key_values, Cache)
    _check.require(ok, "past_key_values", type(past_key_values).__name__, takes)
    _check.integer("layer_idx", layer_idx, 0)
    return past_key_values


def context_of(x: Tensor, attention_mask: Tensor | None, cache: Cache | None, layer_idx: int) -> Context:
    """Where the tokens `x (batch, q_len, hidden_size)` stand, before they are in the cache.

    attention_mask: bool or int `(batch, past + q_len)`, 0 where a slot is padding; None for no padding.
    A cache says by `get_mask_sizes` how many slots it will return and which token the first of them holds.
    """
    batch, q_len = x.shape[:2]
    past = int(cache.get_seq_length(layer_idx)) if cache is not None else 0
    # Asked of a layer that the cache does not hold yet, it answers for an empty one.
    sizes = cache.get_mask_sizes(q_len, layer_idx) if cache is not None else (q_len, 0)
    kv_len, offset = (int(size) for size in sizes)
    slots = torch.arange(past, past + q_len, device=x.device)
    held = torch.arange(offset, offset + kv_len, device=x.device)
    plain = q_len == 1 or past == 0
    if attention_mask is None:
        allowed = None if plain and offset + kv_len == past + q_len else (held <= slots[:, None])[None, None]
        return Context(past, kv_len, slots[None], allowed)
    mask = _checked_mask(attention_mask, batch, past + q_len, x.device)
    # A padded slot gets some position; nothing ever sees it.
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
    # A cache that was allocated ahead returns slots beyond the last token, which no query may see anyway.
    seen = F.pad(mask, (0, max(0, offset + kv_len - mask.shape[1])))[:, offset : offset + kv_len]
    return Context(past, kv_len, positions, (held <= slots[:, None])[None, None] & seen[:, None, None])


def _checked_mask(attention_mask: object, batch: int, length: int, device: torch.device) -> Tensor:
    mask = _check.tensor("attention_mask", attention_mask, ndim=2)
    _check.require(not mask.is_floating_point(), "attention_mask", str(mask.dtype), "bool or integers, 0 for padding")
    shape = tuple(mask.shape)
    takes = f"({batch}, {length}): the past and the new tokens of each row"
    _check.require(shape == (batch, length), "attention_mask", f"shape {shape}", takes)
    return mask.to(device).bool()


def shared_attention(query: Tensor, key: Tensor, value: Tensor, context: Context, scale: float) -> Tensor:
    """Attention of `query (batch, num_attention_heads, q_len, head_dim)` over `key`, `value (batch,
    num_key_value_heads, kv_len, ...)`; consecutive query heads share a KV head. No K or V is repeated.

    A query that may see nothing gives zeros. Softmax in float32 at least.
    """
    batch, heads, q_len, _ = query.shape
    allowed = context.allowed
    if q_len == 1 or _would_repeat(query, allowed):
        return _grouped(query, key, value, context, scale)
    causal = allowed is None
    out = F.scaled_dot_product_attention(query, key, value, allowed, is_causal=causal, scale=scale, enable_gqa=True)
    return zero_where_blind(out, allowed)


def _would_repeat(query: Tensor, allowed: Tensor | None) -> bool:
    """Whether PyTorch may copy K and V to every query head: its plain formula does, its CPU kernel does not.

    On a GPU that formula steps in where the flash kernel does not serve: in 32 bits, and with a mask.
    """
    wide = query.dtype not in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and (wide or allowed is not None)


def _grouped(query: Tensor, key: Tensor, value: Tensor, context: Context, scale: float) -> Tensor:
    """The query heads of a group become the rows of one attention with their shared KV head."""
    batch, heads, q_len, head_dim = query.shape
    shared = key.shape[1]
    rows = query.reshape(batch, shared, heads // shared * q_len, head_dim)
    allowed = context.allowed
    if allowed is None and q_len > 1:
        allowed = torch.ones(q_len, context.kv_len, dtype=torch.bool, device=query.device).tril()[None, None]
    # One row of the mask for each row of the queries; with one query it is the same row for all heads.
    mask = allowed if allowed is None or q_len == 1 else allowed.repeat(1, 1, heads // shared, 1)
    out = F.scaled_dot_product_attention(rows, key, value, mask, scale=scale)
    return zero_where_blind(out.reshape(batch, heads, q_len, -1), allowed)


def zero_where_blind(out: Tensor, allowed: Tensor | None) -> Tensor:
    """Zeros for a query that may see nothing, which not every attention kernel gives."""
    return out if allowed is None else out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
