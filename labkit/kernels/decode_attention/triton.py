"""Split-KV flash decoding (Dao et al., 2023): the tokens of a row are shared out among programs, whose results are
combined by their sums of exponentials in a fixed order, so that the same input gives the same bits every time.

The query heads of a KV head, times the tokens of a step, are the rows of one tile, so that K and V are read once.
Codes stay codes until they are in registers. A key's scale belongs to a channel and goes into the query: q * s . code +
q . minimum; a tile of tokens never crosses a group. A value's scale belongs to a token and a group of channels. Word j,
of two bytes, holds channels j, j + part, and so on, so that each field of bits is a contiguous part of the head: the
query and the output are held in as many parts.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit.kernels.decode_attention.codes import _at_most_128, _offset, _part

DTYPES = (torch.bfloat16, torch.float16)
LOG2_E = math.log2(math.e)
# Rows of the smallest tile that the matrix unit takes, and of the largest one used: more rows read K and V again.
LEAST_ROWS, MOST_ROWS = 16, 32
LARGEST_HEAD = 256
# No split is shorter: below, combining costs more than it saves.
LEAST_TOKENS = 256
MOST_SPLITS = 128


@dataclass(frozen=True)
class Tile:
    """Block sizes for keys of up to `bits` bits an element and heads of up to `head_dim`. `programs` a multiprocessor
    are what tokens are split for; `num_warps` are for the fewest rows. `tuned_on` names the chip that chose them; None
    is a guess, by counting bytes in flight, registers and instructions: one warp does the least work twice."""

    bits: int
    head_dim: int
    block_t: int
    programs: int
    num_warps: int
    num_stages: int
    tuned_on: str | None = None


TILES = (
    Tile(4, 128, 32, programs=16, num_warps=1, num_stages=4),
    Tile(8, 128, 32, programs=16, num_warps=1, num_stages=3),
    Tile(16, 128, 32, programs=16, num_warps=1, num_stages=3),
    Tile(8, 256, 32, programs=8, num_warps=4, num_stages=3),
    Tile(16, 256, 32, programs=8, num_warps=4, num_stages=2),
)


@triton.jit
def _tile(ptr, rows, inside, field: tl.constexpr, part: tl.constexpr, part_p: tl.constexpr):
    """`(rows, part_p)` of what starts at `ptr + rows`; zeros outside."""
    j = tl.arange(0, part_p)
    mask = inside[:, None]
    if part != part_p:
        mask = mask & (j < part)[None, :]
    return tl.load(ptr + rows[:, None] + (field * part + j)[None, :], mask=mask, other=0)


@triton.jit
def _tiles(ptr, rows, inside, fields: tl.constexpr, part: tl.constexpr, part_p: tl.constexpr):
    """One tile a field, as a tuple."""
    tiles = (_tile(ptr, rows, inside, 0, part, part_p),)
    for field in tl.static_range(1, fields):
        tiles = tiles + (_tile(ptr, rows, inside, field, part, part_p),)
    return tiles


@triton.jit
def _zeros(fields: tl.constexpr, rows: tl.constexpr, part_p: tl.constexpr):
    tiles = (tl.zeros((rows, part_p), tl.float32),)
    for _ in tl.static_range(1, fields):
        tiles = tiles + (tl.zeros((rows, part_p), tl.float32),)
    return tiles


@triton.jit
def _dense_scores(q, ptr, rows, inside, scores, part: tl.constexpr, part_p: tl.constexpr):
    """q . k of keys in full precision, `(block_m, tokens)`."""
    for field in tl.static_range(len(q)):
        k = _tile(ptr, rows, inside, field, part, part_p)
        scores = tl.dot(q[field], tl.trans(k), scores)
    return scores


@triton.jit
def _code_scores(q, k, scales_ptr, minimums_ptr, scores, bits: tl.constexpr, part: tl.constexpr, part_p: tl.constexpr):
    """q . k of keys in codes, all of one group: the scales go into the query, q * s . code + q . minimum. What codes
    are too large by comes off once, as q * s . offset with the same rounded q * s."""
    j = tl.arange(0, part_p)
    less: tl.constexpr = -_offset(q[0].dtype == tl.float16)
    same = tl.zeros((scores.shape[0], 8), tl.float32)
    for field in tl.static_range(len(q)):
        scales = tl.load(scales_ptr + field * part + j, mask=j < part, other=0.0).to(q[0].dtype)
        minimums = tl.load(minimums_ptr + field * part + j, mask=j < part, other=0.0).to(q[0].dtype)
        scaled = q[field] * scales[None, :]
        same = tl.dot(q[field], tl.broadcast_to(minimums[:, None], (part_p, 8)), same)
        same = tl.dot(scaled, tl.full((part_p, 8), less, q[0].dtype), same)
        scores = tl.dot(scaled, tl.trans(_part(k, field, bits, q[0].dtype, True)), scores)
    return scores + tl.max(same, axis=1)[:, None]


@triton.jit
def _scores(
    q,
    keys,
    block,
    first,
    at,
    inside,
    block_t: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    part: tl.constexpr,
):
    """q . k of a tile of tokens that lie `at` places of a block, from `first` on."""
    part_p: tl.constexpr = q[0].shape[1]
    ptr, scales_ptr, minimums_ptr, stride_n, stride_t, grid_stride_n, grid_stride_t = keys
    rows = block * stride_n + at * stride_t
    nothing = tl.zeros((q[0].shape[0], block_t), tl.float32)
    if bits == 16:
        return _dense_scores(q, ptr, rows, inside, nothing, part, part_p)
    else:
        k = _tile(ptr, rows, inside, 0, part, part_p)
        grid = block * grid_stride_n + (first // group) * grid_stride_t
        return _code_scores(q, k, scales_ptr + grid, minimums_ptr + grid, nothing, bits, part, part_p)


@triton.jit
def _token_grid(ptr, rows, inside, field: tl.constexpr, part: tl.constexpr, part_p: tl.constexpr, group: tl.constexpr):
    """A value's scales or minimums for the channels of a part, each once where that can be."""
    if group % part == 0:
        return tl.load(ptr + rows + field * part // group, mask=inside, other=0.0)[:, None]
    elif part == part_p and part % group == 0:
        return _tile(ptr, rows, inside, field, part // group, part // group)
    else:
        j = tl.arange(0, part_p)
        mask = inside[:, None] & (j < part)[None, :]
        return tl.load(ptr + rows[:, None] + ((field * part + j) // group)[None, :], mask=mask, other=0.0)


@triton.jit
def _spread(grid, part_p: tl.constexpr):
    """What `_token_grid` read, `(tokens, part_p)`."""
    tokens: tl.constexpr = grid.shape[0]
    many = tl.broadcast_to(grid[:, :, None], (tokens, grid.shape[1], part_p // grid.shape[1]))
    return tl.reshape(many, (tokens, part_p))


@triton.jit
def _values(
    values,
    block,
    at,
    inside,
    fields: tl.constexpr,
    bits: tl.constexpr,
    group: tl.constexpr,
    part: tl.constexpr,
    part_p: tl.constexpr,
):
    """A tile of values for each field, or one of codes and each field's scales and minimums: what has to be read."""
    ptr, scales_ptr, minimums_ptr, stride_n, stride_t, grid_stride_n, grid_stride_t = values
    rows = block * stride_n + at * stride_t
    if bits == 16:
        return _tiles(ptr, rows, inside, fields, part, part_p)
    else:
        read = (_tile(ptr, rows, inside, 0, part, part_p),)
        rows = block * grid_stride_n + at * grid_stride_t
        for field in tl.static_range(fields):
            read = read + (_token_grid(scales_ptr, rows, inside, field, part, part_p, group),)
            read = read + (_token_grid(minimums_ptr, rows, inside, field, part, part_p, group),)
        return read


@triton.jit
def _field_values(read, field: tl.constexpr, bits: tl.constexpr, part_p: tl.constexpr, dtype: tl.constexpr):
    """The values of one field out of what `_values` read, in `dtype`."""
    if bits == 16:
        return read[field]
    else:
        scales, minimums = read[1 + 2 * field].to(dtype), read[2 + 2 * field].to(dtype)
        return _part(read[0], field, bits, dtype) * _spread(scales, part_p) + _spread(minimums, part_p)


@triton.jit
def _add(acc, p, keep, read, bits: tl.constexpr):
    """acc * keep + p . v, field by field."""
    part_p: tl.constexpr = acc[0].shape[1]
    out = (tl.dot(p, _field_values(read, 0, bits, part_p, p.dtype), acc[0] * keep),)
    for field in tl.static_range(1, len(acc)):
        out = out + (tl.dot(p, _field_values(read, field, bits, part_p, p.dtype), acc[field] * keep),)
    return out


@triton.jit
def _weights(scores, sees, most, total):
    """One step of the online softmax, in powers of two: p, how much of what was so far stays, and the new state."""
    scores = tl.where(sees, scores, -float("inf"))
    new_most = tl.maximum(most, tl.max(scores, axis=1))
    # Nothing seen yet: any finite number keeps NaN out.
    at = tl.where(new_most == -float("inf"), 0.0, new_most)
    p = tl.exp2(scores - at[:, None])
    keep = tl.exp2(most - at)
    return p, keep[:, None], new_most, total * keep + tl.sum(p, axis=1)


@triton.jit
def _sees(t, inside, length, q_len, place, tree_ptr, causal: tl.constexpr, has_tree: tl.constexpr):
    """`(block_m, tokens)`: whether the query at `place` among the new tokens sees token t."""
    sees = inside[None, :]
    if has_tree:
        new = (t - (length - q_len))[None, :]
        among = (new >= 0) & (new < q_len) & (place >= 0)[:, None]
        tree = tl.load(tree_ptr + place[:, None] * q_len + new, mask=among, other=0)
        sees = sees & ((new < 0) | (tree != 0))
    elif causal:
        sees = sees & ((t - (length - q_len))[None, :] <= place[:, None])
    return sees


@triton.jit
def _block(table_ptr, batch, t, count, block_size, paged: tl.constexpr):
    """The block of a token, or of each; of one past `count` it is not looked up."""
    if paged == 0:
        return batch.to(tl.int64)
    return tl.load(table_ptr + t // block_size, mask=t < count, other=0).to(tl.int64)


@triton.jit
def _finish(out_ptr, sums_ptr, acc, most, total, rows, inside, part: tl.constexpr, split: tl.constexpr):
    """Write the result; where there are several splits, that of this one and the logarithm of its sum, base 2.

    Of a query that saw nothing that is minus infinity, and the result, which nobody reads, zeros."""
    part_p: tl.constexpr = acc[0].shape[1]
    j = tl.arange(0, part_p)
    # Where nothing was seen, zeros.
    divisor = tl.where(total == 0.0, 1.0, total)
    for field in tl.static_range(len(acc)):
        offsets = rows[:, None] * (len(acc) * part) + (field * part + j)[None, :]
        result = (acc[field] / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, result, mask=inside[:, None] & (j < part)[None, :])
    if split:
        tl.store(sums_ptr + rows, tl.where(total == 0.0, -float("inf"), most + tl.log2(divisor)), mask=inside)


@triton.jit
def _nothing(fields: tl.constexpr, rows: tl.constexpr, part_p: tl.constexpr):
    """The state of a softmax that has seen nothing: weighted sums, the largest score, the sum of weights."""
    most, total = tl.full((rows,), -float("inf"), tl.float32), tl.zeros((rows,), tl.float32)
    return _zeros(fields, rows, part_p), most, total


@triton.jit
def _of_head(ptr, scales_ptr, minimums_ptr, head, stride_h, grid_stride_h):
    """Where one KV head begins in codes, scales and minimums."""
    return ptr + head * stride_h, scales_ptr + head * grid_stride_h, minimums_ptr + head * grid_stride_h


@triton.jit
def _queries_of_codes(q, scale_log2, block_m: tl.constexpr, k_bits: tl.constexpr, v_bits: tl.constexpr):
    """The queries that codes are multiplied by, and what a row's scores are multiplied by, `(block_m,)`."""
    if k_bits == 8 or v_bits == 8:
        # Of bfloat16 the mantissa has no room for 8 bits.
        scaled, undo = _at_most_128(q)
        return scaled, scale_log2 * undo
    else:
        return q, tl.full((block_m,), scale_log2, tl.float32)


@triton.jit(do_not_specialize=["block_size", "splits", "q_len", "table_stride"])
def _decode_attention_kernel(
    q_ptr,  # (batch, heads, q_len, head_dim)
    k_ptr,  # (n, kv_heads, block_size, head_dim), or codes
    v_ptr,
    k_scales_ptr,  # (n, kv_heads, block_size / k_group, head_dim)
    k_minimums_ptr,
    v_scales_ptr,  # (n, kv_heads, block_size, head_dim / v_group)
    v_minimums_ptr,
    k_recent_ptr,  # (batch, kv_heads, room, head_dim)
    v_recent_ptr,
    lengths_ptr,  # (batch,)
    counts_ptr,  # (batch,)
    table_ptr,  # (batch, columns)
    tree_ptr,  # (q_len, q_len)
    out_ptr,  # (batch, heads, q_len, head_dim); with several splits (splits, batch, …), in float32
    sums_ptr,  # (splits, batch, heads, q_len), float32
    scale_log2,
    kv_heads,
    q_len,
    block_size,
    splits,
    table_stride,
    q_stride_b,
    q_stride_h,
    q_stride_i,
    k_stride_n,
    k_stride_h,
    k_stride_t,
    v_stride_n,
    v_stride_h,
    v_stride_t,
    kg_stride_n,
    kg_stride_h,
    kg_stride_t,
    vg_stride_n,
    vg_stride_h,
    vg_stride_t,
    kr_stride_n,
    kr_stride_h,
    kr_stride_t,
    vr_stride_n,
    vr_stride_h,
    vr_stride_t,
    heads_each: tl.constexpr,  # query heads a KV head
    k_bits: tl.constexpr,  # 16: not quantized
    v_bits: tl.constexpr,
    k_group: tl.constexpr,
    v_group: tl.constexpr,
    paged: tl.constexpr,  # 0: contiguous; 1: a tile lies in one block; 2: each token looks its own up
    has_recent: tl.constexpr,
    causal: tl.constexpr,  # more than one query
    has_tree: tl.constexpr,
    split: tl.constexpr,
    block_m: tl.constexpr,
    block_t: tl.constexpr,
    k_fields: tl.constexpr,
    v_fields: tl.constexpr,
    k_part: tl.constexpr,
    v_part: tl.constexpr,
    k_part_p: tl.constexpr,  # a power of two
    v_part_p: tl.constexpr,
):
    batch, head = tl.program_id(0) // kv_heads, (tl.program_id(0) % kv_heads).to(tl.int64)
    r, n_rows = tl.program_id(2) * block_m + tl.arange(0, block_m), heads_each * q_len
    q_rows = batch.to(tl.int64) * q_stride_b + (head * heads_each + r // q_len) * q_stride_h + r % q_len * q_stride_i
    q = _tiles(q_ptr, q_rows, r < n_rows, k_fields, k_part, k_part_p)
    acc, most, total = _nothing(v_fields, block_m, v_part_p)
    codes_q, log2 = _queries_of_codes(q, scale_log2, block_m, k_bits, v_bits)
    length = tl.load(lengths_ptr + batch)
    count = tl.minimum(tl.load(counts_ptr + batch), length) if has_recent else length
    table_ptr += batch.to(tl.int64) * table_stride
    keys = _of_head(k_ptr, k_scales_ptr, k_minimums_ptr, head, k_stride_h, kg_stride_h)
    keys = keys + (k_stride_n, k_stride_t, kg_stride_n, kg_stride_t)
    values = _of_head(v_ptr, v_scales_ptr, v_minimums_ptr, head, v_stride_h, vg_stride_h)
    values = values + (v_stride_n, v_stride_t, vg_stride_n, vg_stride_t)
    span = tl.cdiv(tl.cdiv(count, block_t), splits) * block_t
    begin, i = tl.program_id(1) * span, tl.arange(0, block_t)
    # Each token looks its block up where a tile may lie in several. The look-up is one tile ahead: pointers that came
    # out of a load of the same turn would take the place of the keys and values in the pipeline.
    step = i if paged == 2 else 0
    block = _block(table_ptr, batch, begin + step, count, block_size, paged)
    for t0 in range(begin, tl.minimum(begin + span, count), block_t):
        first = t0 % block_size if paged == 1 else t0
        at = (t0 + i) % block_size if paged == 2 else first + i
        inside = t0 + i < count
        read = _values(values, block, at, inside, v_fields, v_bits, v_group, v_part, v_part_p)
        scores = _scores(codes_q, keys, block, first, at, inside, block_t, k_bits, k_group, k_part)
        sees = _sees(t0 + i, inside, length, q_len, r % q_len, tree_ptr, causal, has_tree)
        p, keep, most, total = _weights(scores * log2[:, None], sees, most, total)
        acc = _add(acc, p.to(codes_q[0].dtype), keep, read, v_bits)
        block = _block(table_ptr, batch, t0 + block_t + step, count, block_size, paged)
    if has_recent:
        # Read again, so that their registers are free in the loop above.
        q = _tiles(q_ptr, q_rows, r < n_rows, k_fields, k_part, k_part_p)
        keys = (k_recent_ptr + head * kr_stride_h, k_recent_ptr, k_recent_ptr, kr_stride_n, kr_stride_t, 0, 0)
        values = (v_recent_ptr + head * vr_stride_h, v_recent_ptr, v_recent_ptr, vr_stride_n, vr_stride_t, 0, 0)
        for t0 in tl.range(tl.program_id(1) * block_t, length - count, splits * block_t, num_stages=1):
            inside = t0 + i < length - count
            read = _values(values, batch.to(tl.int64), t0 + i, inside, v_fields, 16, v_group, v_part, v_part_p)
            scores = _scores(q, keys, batch.to(tl.int64), t0, t0 + i, inside, block_t, 16, k_group, k_part)
            sees = _sees(count + t0 + i, inside, length, q_len, r % q_len, tree_ptr, causal, has_tree)
            p, keep, most, total = _weights(scores * scale_log2, sees, most, total)
            acc = _add(acc, p.to(q[0].dtype), keep, read, 16)
    rows = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * n_rows + r
    _finish(out_ptr, sums_ptr, acc, most, total, rows, r < n_rows, v_part, split)
