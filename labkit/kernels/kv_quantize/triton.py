"""Quantizing keys or values in one pass: each number is read once, codes are packed in registers.

A word of two bytes holds one channel of each part of the head, so that a program works on all parts at once.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit.kernels.kv_types import QuantizedKV, check_grid

# Numbers in one tile of a part: what registers hold.
MOST_IN_TILE = 8192


@dataclass(frozen=True)
class Tile:
    """Tokens of one program for groups along the channels; for groups along the tokens it is the group."""

    block_t: int
    num_warps: int
    tuned_on: str | None = None


TILE = Tile(32, num_warps=4)


@triton.jit
def _grid(low, high, bits: tl.constexpr, scales_ptr):
    """Scale and minimum as they are stored, and in float32."""
    top: tl.constexpr = (1 << bits) - 1
    scale = tl.div_rn(high - low, tl.zeros_like(low) + top).to(scales_ptr.dtype.element_ty)
    minimum = low.to(scales_ptr.dtype.element_ty)
    return scale, minimum, scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _codes(x, scale, minimum, bits: tl.constexpr):
    """round((x - minimum) / scale), half to even, 0 where that is no number; int32."""
    top: tl.constexpr = (1 << bits) - 1
    steps = tl.div_rn(x - minimum, scale)
    steps = tl.where(steps == steps, steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, 0.0), top)
    # Adding 1.5 * 2^23 leaves the nearest integer in the last bits.
    return ((steps + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _low_high(x, axis: tl.constexpr, inside):
    """Smallest and largest; NaN where there is one."""
    low = tl.min(tl.where(inside, x, float("inf")), axis=axis)
    high = tl.max(tl.where(inside, x, -float("inf")), axis=axis)
    # Whether min and max pass a NaN on differs between chips: a sum does.
    spoilt = tl.sum(tl.where(inside & (x != x), 1, 0), axis=axis) > 0
    return tl.where(spoilt, float("nan"), low), tl.where(spoilt, float("nan"), high)


@triton.jit
def _kv_quantize_channel_kernel(
    x_ptr,  # (n, heads, length, head_dim), channels side by side
    codes_ptr,  # (n, heads, length, part), words of two bytes
    scales_ptr,  # (n, heads, length / group, head_dim)
    minimums_ptr,
    heads,
    groups,
    x_stride_n,
    x_stride_h,
    x_stride_t,
    bits: tl.constexpr,
    group: tl.constexpr,
    part: tl.constexpr,
    group_p: tl.constexpr,  # powers of two
    part_p: tl.constexpr,
):
    fields: tl.constexpr = 16 // bits
    row, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, group_p), tl.arange(0, part_p)
    inside = (i < group)[:, None] & (j < part)[None, :]
    x_rows = x_ptr + row // heads * x_stride_n + row % heads * x_stride_h + (g * group + i).to(tl.int64) * x_stride_t
    grid = (row * groups + g) * (fields * part)
    packed = tl.zeros((group_p, part_p), tl.int32)
    for field in tl.static_range(fields):
        x = tl.load(x_rows[:, None] + (field * part + j)[None, :], mask=inside, other=0.0).to(tl.float32)
        # Past the last channel nothing is stored; zeros keep infinities out.
        low, high = _low_high(x, 0, inside | (j >= part)[None, :])
        scale, minimum, wide_scale, wide_minimum = _grid(low, high, bits, scales_ptr)
        tl.store(scales_ptr + grid + field * part + j, scale, mask=j < part)
        tl.store(minimums_ptr + grid + field * part + j, minimum, mask=j < part)
        packed |= _codes(x, wide_scale[None, :], wide_minimum[None, :], bits) << (field * bits)
    rows = (row * groups + g) * group + i
    tl.store(codes_ptr + rows[:, None] * part + j[None, :], packed.to(tl.int16), mask=inside)


@triton.jit
def _kv_quantize_token_kernel(
    x_ptr,  # (n, heads, length, head_dim), channels side by side
    codes_ptr,  # (n, heads, length, part), words of two bytes
    scales_ptr,  # (n, heads, length, head_dim / group)
    minimums_ptr,
    heads,
    length,
    x_stride_n,
    x_stride_h,
    x_stride_t,
    bits: tl.constexpr,
    group: tl.constexpr,
    part: tl.constexpr,
    block_t: tl.constexpr,
):
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * block_t + tl.arange(0, block_t)
    x_rows = x_ptr + row // heads * x_stride_n + row % heads * x_stride_h + t.to(tl.int64) * x_stride_t
    # A group is some neighbouring parts, or part of one.
    parts: tl.constexpr = group // part if group > part else 1
    groups: tl.constexpr = 1 if group > part else part // group
    width: tl.constexpr = part // groups
    fields: tl.constexpr = 16 // bits
    j = tl.arange(0, groups)[:, None] * width + tl.arange(0, width)[None, :]
    inside = (t < length)[:, None, None]
    rows = row * length + t
    packed = tl.zeros((block_t, groups, width), tl.int32)
    for first in tl.static_range(0, fields, parts):
        low = tl.full((block_t, groups), float("inf"), tl.float32)
        high = tl.full((block_t, groups), -float("inf"), tl.float32)
        for field in tl.static_range(first, first + parts):
            x = tl.load(x_rows[:, None, None] + (field * part + j)[None, :, :], mask=inside, other=0.0).to(tl.float32)
            part_low, part_high = _low_high(x, 2, inside | (j >= 0)[None, :, :])
            low = tl.minimum(low, part_low, propagate_nan=tl.PropagateNan.ALL)
            high = tl.maximum(high, part_high, propagate_nan=tl.PropagateNan.ALL)
        scale, minimum, wide_scale, wide_minimum = _grid(low, high, bits, scales_ptr)
        at = rows[:, None] * (fields * part // group) + first // parts * groups + tl.arange(0, groups)[None, :]
        tl.store(scales_ptr + at, scale, mask=(t < length)[:, None])
        tl.store(minimums_ptr + at, minimum, mask=(t < length)[:, None])
        for field in tl.static_range(first, first + parts):
            # Once more, of what the cache of the multiprocessor still holds.
            x = tl.load(x_rows[:, None, None] + (field * part + j)[None, :, :], mask=inside, other=0.0).to(tl.float32)
            packed |= _codes(x, wide_scale[:, :, None], wide_minimum[:, :, None], bits) << (field * bits)
    codes = codes_ptr + rows[:, None, None] * part + j[None, :, :]
    tl.store(codes, packed.to(tl.int16), mask=inside)


def next_power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def why_not(x: torch.Tensor, group_size: int, axis: str) -> str | None:
    """Why the kernels cannot quantize x so, or None."""
    head_dim = x.shape[3]
    if axis == "token" and (head_dim & (head_dim - 1) or group_size & (group_size - 1)):
        return f"by token it takes heads and groups of a power of two; here {head_dim} and {group_size}"
    if axis == "channel" and next_power(group_size) * next_power(head_dim) > 2 * MOST_IN_TILE:
        return f"a group of {group_size} tokens of {head_dim} channels does not fit into registers"
    return None


def quantize(x: torch.Tensor, bits: int, group_size: int, axis: str, scales_dtype: torch.dtype) -> QuantizedKV:
    """As `kv_quantize`, whose checks were made."""
    assert why_not(x, group_size, axis) is None, why_not(x, group_size, axis)
    x = x if x.stride(3) == 1 else x.contiguous()
    n, heads, length, head_dim = x.shape
    grid = check_grid(tuple(x.shape), bits, group_size, axis)
    part = head_dim * bits // 16
    codes = torch.empty(n, heads, length, 2 * part, dtype=torch.uint8, device=x.device)
    scales, minimums = (torch.empty(grid, dtype=scales_dtype, device=x.device) for _ in range(2))
    if codes.numel():
        with torch.cuda.device_of(x):
            _launch(x, codes.view(torch.int16), scales, minimums, bits, group_size, axis, part)
    return QuantizedKV(codes, scales, minimums, None, None, bits, group_size, axis)


def _launch(x, codes, scales, minimums, bits: int, group: int, axis: str, part: int) -> None:
    n, heads, length, _ = x.shape
    if axis == "channel":
        groups = length // group
        _kv_quantize_channel_kernel[(n * heads, groups)](
            x,
            codes,
            scales,
            minimums,
            heads,
            groups,
            *x.stride()[:3],
            bits=bits,
            group=group,
            part=part,
            group_p=next_power(group),
            part_p=next_power(part),
            num_warps=TILE.num_warps,
        )
        return
    _kv_quantize_token_kernel[(n * heads, -(-length // TILE.block_t))](
        x,
        codes,
        scales,
        minimums,
        heads,
        length,
        *x.stride()[:3],
        bits=bits,
        group=group,
        part=part,
        block_t=TILE.block_t,
        num_warps=TILE.num_warps,
    )
