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
        # Heads that share a KV head are the rows of one product: K and V are not repeated.
        grouped = query.reshape(batch, keys.shape[1], -1, head_dim)
        scores = (grouped @ keys.mT).view(batch, heads, q_len, at.kv_len) * head_dim**-0.5
        if at.causal:
            past = at.kv_len - q_len
            sees = torch.ones(q_len, at.kv_len, dtype=torch.bool, device=query.device).tril(past)
            scores = scores.masked_fill(~sees, -torch.inf)
        elif at.mask is not None:
            scores = scores.masked_fill(~at.mask, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        return (weights.view(*grouped.shape[:3], at.kv_len) @ values).view(batch, heads, q_len, head_dim)
