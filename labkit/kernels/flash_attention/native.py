"""PyTorch's own kernel: on a CPU its FlashAttention in C++, on a GPU the fastest that takes the case.

It aligns a causal mask to the start, takes no causal mask beside a padding mask, and does not promise zeros where
nothing is seen. Such cases are given to it a chunk of queries at a time, with that chunk's mask.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# Queries that share a mask of their own: it is chunk x kv_len, so that memory still grows with the length alone.
CHUNK = 256


def native_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, softmax_scale: float, keys: Tensor | None = None
) -> Tensor:
    """Arguments as `tiled_forward` takes them. Differentiable.

    On a GPU, masks with shared KV heads take PyTorch's plain formula: there K and V are repeated, chunk by chunk.
    """
    q, k, v = map(_apart, (q, k, v))
    if keys is not None:  # whatever lies in padding, NaN too, is not to get in
        k, v = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (k, v))
    q_len, kv_len = q.shape[2], k.shape[2]
    causal = causal and q_len > 1  # the last query sees every key
    if keys is None and (not causal or q_len == kv_len):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    chunks = []
    for start in range(0, max(1, q_len), CHUNK):
        chunk = q[:, :, start : start + CHUNK]
        first = start + kv_len - q_len  # the place of the chunk's first query
        seen = max(0, first + chunk.shape[2]) if causal else kv_len
        sees = None if keys is None else keys[:, None, None, :seen]
        if causal:
            place = torch.arange(first, first + chunk.shape[2], device=q.device)
            past = torch.arange(seen, device=q.device) <= place[:, None]
            sees = past[None, None] if sees is None else past & sees
        chunks.append(_masked(chunk, k[:, :, :seen], v[:, :, :seen], sees, softmax_scale))
    return torch.cat(chunks, dim=2)


def _apart(x: Tensor) -> Tensor:
    """x, or a copy where channels do not lie side by side or tokens overlap, which PyTorch's kernel reads wrongly."""
    return x if x.stride(3) == 1 and not 0 < x.stride(2) < x.shape[3] else x.contiguous()


def _masked(q: Tensor, k: Tensor, v: Tensor, sees: Tensor, softmax_scale: float) -> Tensor:
    """With a mask `(batch or 1, 1, q_len or 1, kv_len)`; a query that sees nothing gives zeros, and zero gradients."""
    if not k.shape[2]:
        return q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)
    blind = ~sees.any(-1, keepdim=True)
    # Such a row is computed over everything, so that nothing in it is NaN, and then left out.
    out = F.scaled_dot_product_attention(q, k, v, sees | blind, scale=softmax_scale, enable_gqa=True)
    return out.masked_fill(blind, 0.0)
