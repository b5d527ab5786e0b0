"""Standard attention in the decode engine: what the rung "fused attention" takes the place of."""

from __future__ import annotations

import torch

from labkit.engine.cache import StaticKVCache
from labkit.kv_cache.interface import StepInput


class StandardAttentionCache(StaticKVCache):
    """A static cache whose attention writes the matrix of scores to memory and reads it back, as the formula is
    written: softmax(q k^T / sqrt(head_dim)) v, softmax in float32 (`transformers`' "eager")."""

    def attend(self, layer_idx: int, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        """Attention of `query (batch, num_attention_heads, q_len, head_dim)` over the first `at.kv_len` slots."""
        keys, values = self.keys[layer_idx, :, :, : at.kv_len], self.values[layer_idx, :, :, : at.kv_len]
        batch, heads, q_len, head_dim = query.shape
        # Heads that share a KV head are rows of one product; only the scores are as large as they are.
        grouped = query.reshape(batch, keys.shape[1], -1, q_len, head_dim)
        scores = grouped @ keys.transpose(-1, -2)[:, :, None] * head_dim**-0.5
        if at.causal:
            past = at.kv_len - q_len
            sees = torch.ones(q_len, at.kv_len, dtype=torch.bool, device=query.device).tril(past)
            scores = scores.masked_fill(~sees, -torch.inf)
        elif at.mask is not None:
            mask = at.mask if at.mask.ndim < 4 else at.mask[:, :, None]
            scores = scores.masked_fill(~mask, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        return (weights @ values[:, :, None]).reshape(batch, heads, q_len, head_dim)
