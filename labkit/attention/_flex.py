"""FlexAttention with the causal mask of this course: end-aligned, and made of blocks without the whole matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_BLOCK = 128
# torch.compile refuses a ninth shape of one function; before that it is made to forget the others.
_MOST_SHAPES = 8


@functools.cache
def _compiled() -> Callable:
    # The whole graph, or an error: uncompiled it would make the matrix of scores, in silence.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


_seen: set[tuple] = set()


def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of `(batch, heads, q_len, head_dim)`; the first call of a shape compiles, for seconds.

    PyTorch keeps eight compiled shapes of a function. Before a ninth, `torch.compiler.reset()` throws all compiled
    functions of the process away, others' too. Errors: NotImplementedError for gradients on a CPU.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if needs_grad and q.device.type == "cpu":
        raise NotImplementedError("FlexAttention has no backward pass on a CPU")
    shape = (*q.shape, *k.shape, q.dtype, q.device, causal, torch.is_grad_enabled(), needs_grad)
    if shape not in _seen and len(_seen) == _MOST_SHAPES:
        torch.compiler.reset()
        _seen.clear()
    _seen.add(shape)
    mask = causal_blocks(q.shape[2], k.shape[2], q.device) if causal else None
    return _compiled()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


@functools.lru_cache(maxsize=32)
def causal_blocks(q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    """Which blocks of 128 x 128 are seen, in full and in part: (blocks of queries) x (blocks of keys) numbers, where
    PyTorch's own create_block_mask first makes q_len x kv_len."""
    offset, blocks = kv_len - q_len, -(-kv_len // _BLOCK)
    first = torch.arange(0, q_len, _BLOCK, device=device) + offset
    last = (first + _BLOCK - 1).clamp(max=kv_len - 1)
    # A block is whole if its last key is no later than the first query; the last block may be a short one.
    full = ((first + 1).clamp(min=0) // _BLOCK).clamp(max=blocks)
    seen = (last + _BLOCK).clamp(min=0) // _BLOCK
    order = torch.arange(blocks, device=device, dtype=torch.int32).expand(len(first), blocks)
    in_part = (order + full[:, None]) % blocks

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + offset

    counts = ((seen - full).int(), in_part.int(), full.int(), order.contiguous())
    return BlockMask.from_kv_blocks(
        *(x[None, None] for x in counts), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(q_len, kv_len)
    )
