"""The kernel for packed weights: split-K for few rows, a tile a program for more.

y^T = W x^T: the weight is the first operand of the matrix unit, which on Hopper may come from registers, where the
codes are made; x comes from shared memory. With fewer rows than a chip has use for, several programs share a tile of
outputs, each takes some of the columns (split-K), and the one that finishes last adds the parts in a fixed order, so
that the same x gives the same bits every time.
Codes become floats without a conversion and mostly without a shift: bits or-ed into the mantissa of 2^23 make the
float 2^23 + code * 2^place, and one multiply-add brings that to code - zero, which bfloat16 and float16 both hold
exactly. The scale multiplies the sum over a group in float32, so that nothing of a weight is rounded.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from labkit.kernels.quantized_linear.interleaved import SMALLEST_TILE, WORDS, InterleavedWeight, block_columns

DTYPES = (torch.bfloat16, torch.float16)
# CUDA's limit on the second and third side of a grid.
_MOST_PROGRAMS = 65535


@dataclass(frozen=True)
class Tile:
    """Block sizes for up to `rows` rows of x. With `programs`, K is split until every multiprocessor has up to that
    many, and `rows` is at most `block_m`; with 0 it is not split. `tuned_on` names the chip that chose them; None is a
    guess, by counting bytes and registers."""

    rows: int
    block_n: int
    block_m: int
    programs: int
    num_warps: int
    num_stages: int
    tuned_on: str | None = None


# No tile is larger: on sm_100 Triton 3.7 gives each of the products that follow one another tensor memory of its own.
# At 64 x 64 these take all of it, so that one program fits a multiprocessor there; at 128 outputs or 128 rows they take
# more than there is, and what is compiled only traps.
TILES = (
    Tile(16, 64, 16, programs=4, num_warps=4, num_stages=3),
    Tile(32, 64, 32, programs=4, num_warps=4, num_stages=3),
    Tile(64, 64, 64, programs=2, num_warps=4, num_stages=2),
    Tile(1 << 31, 64, 64, programs=0, num_warps=4, num_stages=2),
)
# With act-order x's columns are gathered in the kernel up to so many rows, and by a kernel of their own beyond.
GATHER_ROWS = 16
# From here on the weight is dequantized and multiplied by the library. A guess until a GPU has measured it: writing 16
# bits a weight and reading them again costs about as long as the product of 200 rows.
DEQUANTIZE_FROM_ROWS = 256


@triton.jit
def _grid(pairs_ptr, group, out_features, n):
    """Scale and zero point of each row of the tile in one group: `(BLOCK_N,)` in float32."""
    pairs = tl.load(pairs_ptr + group * out_features + n, mask=n < out_features, other=0)
    # A bfloat16 is the upper half of a float32.
    return (pairs & -65536).to(tl.float32, bitcast=True), (pairs & 0xFF).to(tl.float32)


@triton.jit
def _codes(words, field: tl.constexpr, zeros, bits: tl.constexpr):
    """code - zero of one field of the words, `(BLOCK_N, 16)`, in float32; exact."""
    place: tl.constexpr = field * bits % 16
    upper_half: tl.constexpr = field * bits // 16 * 16
    down: tl.constexpr = 1.0 / (1 << place)
    # 2^23 + code * 2^place, then one multiply-add. Sixteen bits are all that the mantissa takes without a shift.
    raised = (words >> upper_half) & (((1 << bits) - 1) << place) | 0x4B000000
    return raised.to(tl.float32, bitcast=True) * down - (zeros + 8388608.0 * down)[:, None]


@triton.jit
def _add_parts(y_ptrs, parts_ptrs, tickets_ptr, total, inside, tile, split_k, part_size):
    """Keep this program's part; the last of a tile's programs adds all of them, first to last, and writes y."""
    tl.store(parts_ptrs + tl.program_id(2) * part_size, total, mask=inside)
    # All threads' stores come before the ticket is drawn, and the ticket before the last one's loads.
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel")
    if ticket == split_k - 1:
        total = tl.zeros_like(total)
        for part in range(split_k):
            total += tl.load(parts_ptrs + part * part_size, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(y_ptrs, total.to(y_ptrs.dtype.element_ty), mask=inside)
        tl.store(tickets_ptr + tile, 0)


@triton.jit(do_not_specialize=["rows", "split_k"])
def _quantized_linear_kernel(
    x_ptr,  # (rows, in_features), rows x_stride apart
    words_ptr,  # (blocks, out_features, 16)
    pairs_ptr,  # (groups, out_features)
    order_ptr,  # (in_features,)
    y_ptr,  # (rows, out_features)
    parts_ptr,  # (split_k, rows, out_features), float32
    tickets_ptr,  # (tiles,)
    rows,
    out_features,
    in_features,
    group_size,
    x_stride,
    split_k,
    bits: tl.constexpr,
    span: tl.constexpr,  # neighbouring fields that share a group, in every block
    has_order: tl.constexpr,
    split: tl.constexpr,
    block_n: tl.constexpr,
    block_m: tl.constexpr,
):
    fields: tl.constexpr = 32 // bits
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    m = tl.program_id(1) * block_m + tl.arange(0, block_m)
    word = tl.arange(0, 16)
    x_rows = x_ptr + m.to(tl.int64)[None, :] * x_stride
    last_group = tl.cdiv(in_features, group_size) - 1
    total = tl.zeros((block_n, block_m), tl.float32)
    for block in range(tl.program_id(2), tl.cdiv(in_features, 16 * fields), split_k):
        words_ptrs = words_ptr + (block * out_features + n)[:, None] * 16 + word[None, :]
        words = tl.load(words_ptrs, mask=(n < out_features)[:, None], other=0)
        for first in tl.static_range(0, fields, span):
            # The filling of the last block may lie past the last group; x is zero there.
            group = tl.minimum((block * fields + first) * 16 // group_size, last_group)
            scales, zeros = _grid(pairs_ptr, group, out_features, n)
            part = tl.zeros((block_n, block_m), tl.float32)
            for field in tl.static_range(first, first + span):
                k = (block * fields + field) * 16 + word
                column = k
                if has_order:
                    column = tl.load(order_ptr + k, mask=k < in_features, other=0)
                inside = (k < in_features)[:, None] & (m < rows)[None, :]
                x = tl.load(x_rows + column[:, None], mask=inside, other=0.0)
                part = tl.dot(_codes(words, field, zeros, bits).to(x.dtype), x, part)
            total += part * scales[:, None]
    inside = (n < out_features)[:, None] & (m < rows)[None, :]
    offsets = m.to(tl.int64)[None, :] * out_features + n[:, None]
    if split:
        part_size = rows * out_features
        _add_parts(
            y_ptr + offsets, parts_ptr + offsets, tickets_ptr, total, inside, tl.program_id(0), split_k, part_size
        )
    else:
        tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dequantize_kernel(
    words_ptr,  # (blocks, out_features, 16)
    pairs_ptr,  # (groups, out_features)
    order_ptr,  # (in_features,)
    out_ptr,  # (out_features, in_features)
    out_features,
    in_features,
    group_size,
    bits: tl.constexpr,
    span: tl.constexpr,
    has_order: tl.constexpr,
    block_n: tl.constexpr,
):
    fields: tl.constexpr = 32 // bits
    block = tl.program_id(1)
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    word = tl.arange(0, 16)
    last_group = tl.cdiv(in_features, group_size) - 1
    words_ptrs = words_ptr + (block * out_features + n)[:, None] * 16 + word[None, :]
    words = tl.load(words_ptrs, mask=(n < out_features)[:, None], other=0)
    for first in tl.static_range(0, fields, span):
        group = tl.minimum((block * fields + first) * 16 // group_size, last_group)
        scales, zeros = _grid(pairs_ptr, group, out_features, n)
        for field in tl.static_range(first, first + span):
            k = (block * fields + field) * 16 + word
            column = k
            if has_order:
                column = tl.load(order_ptr + k, mask=k < in_features, other=0)
            value = _codes(words, field, zeros, bits) * scales[:, None]
            inside = (n < out_features)[:, None] & (k < in_features)[None, :]
            out = out_ptr + n.to(tl.int64)[:, None] * in_features + column[None, :]
            tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside)


def _cdiv(a: int, b: int) -> int:
    """Rounded up. `triton.cdiv` takes 3 microseconds outside a kernel."""
    return -(-a // b)


def fields_in_a_group(weight: InterleavedWeight) -> int:
    """Of the fields of a block, how many neighbours share a group whichever the block."""
    columns = block_columns(weight.bits)
    return (columns if weight.group_size == weight.in_features else math.gcd(weight.group_size, columns)) // WORDS


def tile_for(rows: int) -> Tile:
    """The row of the table for so many rows of x."""
    return next(tile for tile in TILES if rows <= tile.rows)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def split_for(tile: Tile, weight: InterleavedWeight) -> int:
    """Programs that share a tile of outputs: as many as fill the chip, at most one a block."""
    if not tile.programs:
        return 1
    tiles = _cdiv(weight.out_features, tile.block_n)
    wanted = tile.programs * _multiprocessors(weight.device) // tiles
    return max(1, min(wanted, weight.words.shape[0]))


def multiply(x: torch.Tensor, weight: InterleavedWeight, tile: Tile | None = None) -> torch.Tensor:
    """`x (rows, in_features)` in bfloat16 or float16 to `(rows, out_features)`; rows may be strided, columns not."""
    rows, n = x.shape[0], weight.out_features
    assert x.ndim == 2 and x.shape[1] == weight.in_features and x.dtype in DTYPES, (x.shape, x.dtype)
    assert x.device == weight.device and (x.stride(1) == 1 or weight.in_features == 1), (x.device, x.stride())
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if not rows:
        return y
    tile = tile or tile_for(rows)
    assert not tile.programs or rows <= tile.block_m, f"{rows} rows; the tickets are for {tile.block_m}"
    assert tile.block_n >= SMALLEST_TILE and _cdiv(rows, tile.block_m) <= _MOST_PROGRAMS, (tile, rows)
    split_k = split_for(tile, weight)
    order = weight.order
    if order is not None and rows > GATHER_ROWS:
        x, order = x.index_select(1, order), None
    if not x.is_cuda:
        # The interpreter may have been interrupted in the middle of a product.
        weight.tickets.zero_()
    parts = torch.empty(split_k, rows, n, dtype=torch.float32, device=x.device) if tile.programs else y
    grid = (_cdiv(n, tile.block_n), _cdiv(rows, tile.block_m), split_k)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(x):
        _launch(grid, tile, x, weight, order, y, parts)
    return y


def _launch(
    grid: tuple[int, int, int],
    tile: Tile,
    x: torch.Tensor,
    weight: InterleavedWeight,
    order: torch.Tensor | None,
    y: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    _quantized_linear_kernel[grid](
        x,
        weight.words,
        weight.pairs,
        weight.words if order is None else order,
        y,
        parts,
        weight.tickets,
        x.shape[0],
        weight.out_features,
        weight.in_features,
        weight.group_size,
        x.stride(0),
        grid[2],
        bits=weight.bits,
        span=fields_in_a_group(weight),
        has_order=order is not None,
        split=tile.programs > 0,
        block_n=tile.block_n,
        block_m=tile.block_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


DEQUANTIZE_BLOCK_N = 64


def dequantize(weight: InterleavedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight `(out_features, in_features)` in `dtype`, columns in the model's order."""
    assert dtype.is_floating_point, dtype
    out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.device)
    with torch.cuda.device_of(out):
        _dequantize_kernel[(_cdiv(weight.out_features, DEQUANTIZE_BLOCK_N), weight.words.shape[0])](
            weight.words,
            weight.pairs,
            weight.words if weight.order is None else weight.order,
            out,
            weight.out_features,
            weight.in_features,
            weight.group_size,
            bits=weight.bits,
            span=fields_in_a_group(weight),
            has_order=weight.order is not None,
            block_n=DEQUANTIZE_BLOCK_N,
        )
    return out
