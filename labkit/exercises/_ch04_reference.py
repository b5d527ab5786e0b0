"""Attention by its definition, in float64, which chapter 04's checks compare with."""

import torch
from torch import Tensor


def visible(q_len: int, kv_len: int, causal: bool = True) -> Tensor:
    """Which key (column) a query (row) sees: all, or under the causal mask those up to its own place, the last query
    standing at the last key; bool (q_len, kv_len)."""
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    return mask.tril(kv_len - q_len) if causal else mask


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """softmax(query @ key^T * scale) @ value over the keys that are seen, zeros where none is; float64.

    query (..., q_len, head_dim), key and value (..., kv_len, head_dim); scale is 1 / sqrt(head_dim) unless given.
    """
    scores = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights.masked_fill(~seen, 0.0) @ value.double()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-3) -> bool:
    """Within `tolerance` of the largest value of b, which is about what float32 keeps of scores in the hundreds."""
    return bool((a - b).abs().max() <= tolerance * max(1e-6, float(b.abs().max())))
