"""How much attention each cached token gets, and which tokens that leaves in the cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of float32 scores held at a time: 64 MB.
_SCORES_AT_ONCE = 1 << 24


def attention_mass(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """What each key gets of the softmax weights of all queries, causally.

    query: `(batch, num_attention_heads, q_len, head_dim)`, the last q_len tokens of keys; keys: `(batch,
    num_key_value_heads, kv_len, head_dim)`, both rotated. Returns float32 `(batch, num_key_value_heads, kv_len)`,
    summed over the queries and over the query heads that share a KV head: it adds up to q_len times their number.
    """
    batch, heads, q_len, head_dim = query.shape
    kv_heads, kv_len = keys.shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, q_len, head_dim)
    rows = max(1, _SCORES_AT_ONCE // (batch * heads * kv_len))
    mass = torch.zeros(batch, kv_heads, kv_len, dtype=torch.float32, device=keys.device)
    for start in range(0, q_len, rows):
        part = grouped[:, :, :, start : start + rows]
        logits = (part @ keys[:, :, None].transpose(-1, -2)).float() * scaling
        hidden = _future(start, part.shape[3], q_len, kv_len, keys.device)
        mass += logits.masked_fill_(hidden, -torch.inf).softmax(-1).sum((2, 3))
    return mass


def _future(start: int, rows: int, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """True where the queries from `start` on may not look, `(rows, kv_len)`: the queries are the last of the keys."""
    at = torch.arange(start, start + rows, device=device) + kv_len - q_len
    return torch.arange(kv_len, device=device) > at[:, None]


def pooled(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Each token's score from its `kernel_size` neighbours, `(batch, num_key_value_heads, n)`; fewer at the ends.

    pooling: "avg" for their mean, "max" for the highest. What stands beside a token that matters is kept with it (Li et
    al. 2024, section 4.2).
    """
    half = kernel_size // 2
    if pooling == "max":
        return F.max_pool1d(scores, kernel_size, stride=1, padding=half)
    return F.avg_pool1d(scores, kernel_size, stride=1, padding=half, count_include_pad=False)


def heaviest(scores: Tensor, total: int, recent: int) -> Tensor:
    """The `recent` last tokens and the highest scores among the others, `total` in all: index in ascending order.

    scores: `(batch, num_key_value_heads, n)`, `recent <= total <= n`; returns `(batch, num_key_value_heads, total)`.
    """
    n = scores.shape[-1]
    older = scores[..., : n - recent].topk(total - recent, dim=-1).indices.sort(dim=-1).values
    latest = torch.arange(n - recent, n, device=scores.device).expand(*scores.shape[:-1], recent)
    return torch.cat((older, latest), dim=-1)
