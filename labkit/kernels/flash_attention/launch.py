"""What launches the forward kernel, and the autograd function around it. Nothing here waits for a GPU."""

from functools import cache

import torch

from labkit.kernels.chips import SHARED_BYTES
from labkit.kernels.flash_attention.backward import backward
from labkit.kernels.flash_attention.blocks import (
    LEAST,
    Blocks,
    blocks_for,
    chip_class,
    padded_head,
    shared_bytes,
)
from labkit.kernels.flash_attention.layout import LOG2_E, can_describe, capability, describe, last_together
from labkit.kernels.flash_attention.once import differentiable_once
from labkit.kernels.flash_attention.triton import _forward_kernel

DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
# The largest tile that block_sizes may ask for.
MOST = 256
# Of the L2 cache, what K and V of the heads that run beside each other may fill.
_L2_SHARE = 0.5
_L2_BYTES = 4 * 2**20


def why_not(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_sizes: tuple[int, int] | None = None
) -> str | None:
    """Why the kernel cannot run these, or None."""
    if q.dtype not in DTYPES or (q.device.type == "cpu" and q.dtype is not torch.float16):
        takes = "bfloat16 and float16" if q.device.type != "cpu" else "float16 alone in Triton's interpreter"
        return f"it takes {takes}, and q is {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > LARGEST_HEAD:
        return f"it takes heads of up to {LARGEST_HEAD}, and these have {q.shape[3]}"
    return None if block_sizes is None else _why_not_blocks(q, block_sizes)


def _why_not_blocks(q: torch.Tensor, block_sizes: tuple[int, int]) -> str | None:
    if not all(LEAST <= n <= MOST and n & (n - 1) == 0 for n in block_sizes):
        return f"its block sizes are powers of two from {LEAST} to {MOST}, and these are {block_sizes}"
    takes, has = shared_bytes(q.shape[3], *block_sizes, 1), SHARED_BYTES[chip_class(capability(q.device))]
    if takes > has:
        return f"tiles of {block_sizes} take {takes} bytes of shared memory, and there are {has}"
    return None


@cache
def _l2_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _L2_BYTES


def heads_together(k: torch.Tensor, heads_each: int) -> int:
    """Query heads that run beside each other: those of as many KV heads as the L2 cache holds, and at least of one."""
    bytes_each = 2 * k.shape[2] * k.shape[3] * k.element_size()
    fit = max(1, int(_L2_SHARE * _l2_bytes(k.device)) // max(1, bytes_each))
    # No more than there are: the kernel multiplies them by the blocks of a head, in 32 bits.
    return heads_each * min(fit, k.shape[0] * k.shape[1])


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bounds: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    block_sizes: tuple[int, int] | None,
    described: bool | None = None,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, laid out as q, and the logarithm to base 2 of each query's sum, float32 `(batch, heads, q_len)`.

    `described`: by descriptors, or by pointers; None is what is better on this GPU where the tensors allow it.
    `blocks`: in place of the table's row, to compare what a tile's sizes alone do not say.
    """
    assert why_not(q, k, v, block_sizes) is None, why_not(q, k, v, block_sizes)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not q.numel() or not k.shape[2]:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), lse.fill_(-torch.inf)
    if softmax_scale < 0:
        # The kernel takes the largest product for the largest score.
        q, softmax_scale = -q, -softmax_scale
    q, k, v = map(last_together, (q, k, v))
    out = torch.empty_like(q)
    if out.stride(3) != 1:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if described is None:
        described = padding_mask is None and can_describe(q, k, v)
    blocks = blocks or blocks_for(q.shape[3], capability(q.device), described)
    if block_sizes is not None:
        blocks = blocks.resized(*block_sizes, capability(q.device))
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(q):
        _launch(q, k, v, out, lse, causal, softmax_scale, bounds, padding_mask, blocks)
    return out, lse


def constants(head_dim: int, heads_each: int, causal: bool, has_bounds: bool, has_mask: bool, blocks: Blocks) -> dict:
    """The kernel's constants by name."""
    return {
        "heads_each": heads_each,
        "head_dim": head_dim,
        "padded": padded_head(head_dim),
        "causal": causal,
        "has_bounds": has_bounds,
        "has_mask": has_mask,
        "described": blocks.described,
        "block_q": blocks.block_q,
        "block_k": blocks.block_k,
    }


def _launch(q, k, v, out, lse, causal, softmax_scale, bounds, padding_mask, blocks: Blocks) -> None:
    batch, heads, q_len, head_dim = q.shape
    heads_each = heads // k.shape[1]
    fixed = constants(head_dim, heads_each, causal, bounds is not None, padding_mask is not None, blocks)
    readers = (q, k, v)
    if blocks.described:
        rows = (blocks.block_q, blocks.block_k, blocks.block_k)
        readers = tuple(describe(x, n, fixed["padded"]) for x, n in zip(readers, rows, strict=True))
    _forward_kernel[(-(-q_len // blocks.block_q) * batch * heads,)](
        *readers,
        out,
        lse,
        lse if bounds is None else bounds,
        lse if padding_mask is None else padding_mask,
        softmax_scale * LOG2_E,
        heads,
        batch * heads,
        heads_together(k, heads_each),
        q_len,
        k.shape[2],
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        0 if padding_mask is None else padding_mask.stride(0),
        **fixed,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        maxnreg=blocks.max_registers,
    )


class _Attention(torch.autograd.Function):
    """The forward and the backward kernels; kept for the latter are q, k, v, the output and each query's sum."""

    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale, bounds, padding_mask, block_sizes):
        out, lse = forward(q, k, v, causal, softmax_scale, bounds, padding_mask, block_sizes)
        ctx.save_for_backward(q, k, v, out, lse, bounds, padding_mask)
        ctx.options = (causal, softmax_scale)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        *saved, bounds, padding_mask = ctx.saved_tensors
        return *backward(dout, *saved, *ctx.options, bounds, padding_mask), None, None, None, None, None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bounds: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> torch.Tensor:
    """As `flash_attention`; differentiable once.

    bounds: int32 `(batch, 2)`, contiguous, the first key that is no padding and one past the last. padding_mask: bool
    `(batch, kv_len)`, False is padding; needed only where there may be holes between the bounds.
    """
    if padding_mask is not None and padding_mask.stride(1) != 1:
        padding_mask = padding_mask.contiguous()
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _Attention.apply(q, k, v, causal, softmax_scale, bounds, padding_mask, block_sizes)
    return forward(q, k, v, causal, softmax_scale, bounds, padding_mask, block_sizes)[0]
