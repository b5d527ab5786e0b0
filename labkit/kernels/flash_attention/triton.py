"""The forward pass of FlashAttention-2 (Dao, 2023, algorithm 1): a program owns a block of queries and goes once over
the keys that they see, with the softmax's largest score and sum kept beside the output, in float32 and powers of two.

Tiles that every query of the block sees whole need no mask, and one loop; those at the diagonal or at an end have
another. A tile that no query sees is not loaded; a KV head is found by its number and never repeated.

The kernel has two forms. By pointers it takes any strides and holes in the keys. By descriptors, which the host makes,
Hopper's copy engine fetches a tile as one instruction of one thread, and fills with zeros what lies past an end. What
was counted in the compiler's output (Triton 3.6 and 3.7, not run), heads of 128 in bfloat16, 128 x 128 with 8 warps:
189 registers a thread against 254 by pointers; both products are HGMMA, the weights their left operand in registers;
K and V come by UTMALDG. In each turn of the loop the warps meet at a barrier before the product with V, and the wait
after the product with K waits for both: no product runs beside a softmax of its own program. Hence two programs a
multiprocessor, of 64 keys a tile and 4 warps (`blocks.py`). Neither a loop that multiplies the next keys first nor one
that puts the product with V behind the next scores changed those waits.

Left out: `warp_specialize=True`. For sm_90 the compiler ignores it with 8 warps (the same registers, no setmaxnreg)
and fails with 4; for sm_100 it makes partitions, of which Triton 3.7 spills 16 bytes with 8 warps and both hundreds
with 4. Programs that persist: nothing of the next tile would run beside the end of the last.
"""

import triton
import triton.language as tl


@triton.jit
def _place(index, blocks, all_heads, together, causal: tl.constexpr):
    """Which block of queries of which head the program `index` takes.

    `together` heads, whose K and V fit into the L2 cache, run beside each other. Of their blocks those come first that
    see the most keys, so that short ones fill the end.
    """
    group = index // (blocks * together)
    first = group * together
    here = tl.minimum(together, all_heads - first)
    rest = index - group * (blocks * together)
    block = rest // here
    if causal:
        block = blocks - 1 - block
    return block, first + rest % here


@triton.jit
def _tile(
    x, at, first, seen, described: tl.constexpr, rows: tl.constexpr, head_dim: tl.constexpr, padded: tl.constexpr
):
    """`(rows, padded)` of one head from row `first` on; zeros past the head's end, and where `seen` is given and false.

    `x`: a descriptor, and `at` = (batch, head, unused); or a pointer to the head, and `at` = (0, 0, stride of a row).
    """
    if described:
        return x.load([at[0], at[1], first, 0]).reshape([rows, padded])
    else:
        d = tl.arange(0, padded)
        # Only the tile's first row can lie further off than 32 bits count.
        pointers = x + tl.cast(first, tl.int64) * at[2] + (tl.arange(0, rows) * at[2])[:, None] + d[None, :]
        if padded != head_dim and seen is not None:
            return tl.load(pointers, mask=seen[:, None] & (d < head_dim)[None, :], other=0.0)
        elif padded != head_dim:
            return tl.load(pointers, mask=(d < head_dim)[None, :], other=0.0)
        elif seen is not None:
            return tl.load(pointers, mask=seen[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def _weights(scores, sees, most, total, scale_log2):
    """One step of the online softmax: p, how much stays of what was so far, the new largest score and sum."""
    if sees is None:
        new_most = tl.maximum(most, tl.max(scores, axis=1) * scale_log2)
        at = new_most
        # One fused multiplication and addition a score.
        p = tl.exp2(scores * scale_log2 - at[:, None])
    else:
        scores = tl.where(sees, scores * scale_log2, -float("inf"))
        new_most = tl.maximum(most, tl.max(scores, axis=1))
        # Nothing seen yet: any finite number keeps NaN out.
        at = tl.where(new_most == -float("inf"), 0.0, new_most)
        p = tl.exp2(scores - at[:, None])
    keep = tl.exp2(most - at)
    return p, keep, new_most, total * keep + tl.sum(p, axis=1)


@triton.jit
def _sees(mask_ptr, t, place, stop, causal: tl.constexpr, has_mask: tl.constexpr):
    """Which keys `t` are there, `(block_k,)`, and which of them each query at `place` sees, `(block_q, block_k)`."""
    there = t < stop
    if has_mask:
        there = there & (tl.load(mask_ptr + t, mask=there, other=0) != 0)
    sees = there[None, :]
    if causal:
        sees = sees & (t[None, :] <= place[:, None])
    return there, sees


@triton.jit
def _keys_of(bounds_ptr, batch, place, kv_len, causal: tl.constexpr, has_bounds: tl.constexpr, rows: tl.constexpr):
    """The first key that a block of queries visits, one past the last that all of them see, one past the last visited,
    and one past the last that there is. `place` is the first query's."""
    first, stop = 0, kv_len
    if has_bounds:
        first = tl.maximum(tl.load(bounds_ptr + 2 * batch), 0)
        stop = tl.minimum(tl.load(bounds_ptr + 2 * batch + 1), kv_len)
    if causal:
        return first, tl.minimum(stop, place + 1), tl.minimum(stop, place + rows), stop
    else:
        return first, stop, stop, stop


@triton.jit
def _visit(
    state,
    q,
    keys,
    values,
    begin,
    end,
    edge,
    scale_log2,
    masked: tl.constexpr,
    causal: tl.constexpr,
    has_bounds: tl.constexpr,
    has_mask: tl.constexpr,
    head_dim: tl.constexpr,
    block_k: tl.constexpr,
    described: tl.constexpr,
):
    """The tiles of keys from `begin` to `end`; those that all queries see whole, or, `masked`, those at an edge."""
    padded: tl.constexpr = q.shape[1]
    acc, most, total = state
    mask_ptr, place, stop = edge
    for t0 in range(begin, end, block_k):
        there, sees = None, None
        if masked or has_mask:
            there, sees = _sees(mask_ptr, t0 + tl.arange(0, block_k), place, stop, causal and masked, has_mask)
        k = _tile(keys[0], keys[1], t0, there, described, block_k, head_dim, padded)
        p, keep, most, total = _weights(tl.dot(q, k.T), sees, most, total, scale_log2)
        v = _tile(values[0], values[1], t0, there, described, block_k, head_dim, padded)
        if described and masked and has_bounds:
            # 0 * NaN is NaN: what lies behind the last key must not get in.
            v = tl.where(there[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None])
    return acc, most, total


@triton.jit
def _write(out_ptr, lse_ptr, state, first, row_stride, q_len, head_dim: tl.constexpr):
    """The output from row `first` on, and each sum's logarithm, base 2; of a query that saw nothing zeros and minus
    infinity. What is worked out here, and not shared with the loads of q, takes no registers during the loops."""
    acc, most, total = state
    i, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    inside = i < q_len - first
    divisor = tl.where(total == 0.0, 1.0, total)
    # One division a row, not one an element.
    result = (acc * (1.0 / divisor)[:, None]).to(out_ptr.dtype.element_ty)
    pointers = out_ptr + tl.cast(first, tl.int64) * row_stride + (i * row_stride)[:, None] + d[None, :]
    tl.store(pointers, result, mask=inside[:, None] & (d < head_dim)[None, :])
    tl.store(lse_ptr + first + i, most + tl.log2(divisor), mask=inside)


@triton.jit(do_not_specialize=["q_len", "kv_len", "heads", "all_heads", "together", "mask_stride_b"])
def _forward_kernel(
    q,  # (batch, heads, q_len, head_dim): a pointer, or a descriptor of (1, 1, block_q, padded)
    k,  # (batch, kv_heads, kv_len, head_dim): the same, of (1, 1, block_k, padded)
    v,
    out_ptr,  # as q
    lse_ptr,  # (batch, heads, q_len), float32
    bounds_ptr,  # (batch, 2), int32
    mask_ptr,  # (batch, kv_len), bool
    scale_log2,
    heads,
    all_heads,  # of all rows of the batch
    together,
    q_len,
    kv_len,
    q_stride_b,
    q_stride_h,
    q_stride_i,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    v_stride_b,
    v_stride_h,
    v_stride_t,
    out_stride_b,
    out_stride_h,
    out_stride_i,
    mask_stride_b,
    heads_each: tl.constexpr,  # query heads a KV head
    head_dim: tl.constexpr,
    padded: tl.constexpr,  # head_dim, to a power of two
    causal: tl.constexpr,
    has_bounds: tl.constexpr,
    has_mask: tl.constexpr,
    described: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    block, head = _place(tl.program_id(0), tl.cdiv(q_len, block_q), all_heads, together, causal)
    batch, head = head // heads, head % heads
    far, kv_head = batch.to(tl.int64), head // heads_each
    out_ptr += far * out_stride_b + head.to(tl.int64) * out_stride_h
    lse_ptr += (far * heads + head) * q_len
    mask_ptr += far * mask_stride_b
    if described:
        q_at, k_at, v_at = (batch, head, 0), (batch, kv_head, 0), (batch, kv_head, 0)
    else:
        q += far * q_stride_b + head.to(tl.int64) * q_stride_h
        k += far * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        v += far * v_stride_b + kv_head.to(tl.int64) * v_stride_h
        q_at, k_at, v_at = (0, 0, q_stride_i), (0, 0, k_stride_t), (0, 0, v_stride_t)
    first_row = block * block_q
    rows = first_row + tl.arange(0, block_q)
    tile = _tile(q, q_at, first_row, rows < q_len, described, block_q, head_dim, padded)
    place = first_row + kv_len - q_len
    first, whole, end, stop = _keys_of(bounds_ptr, batch, place, kv_len, causal, has_bounds, block_q)
    middle = first + tl.maximum(whole - first, 0) // block_k * block_k
    edge = (mask_ptr, place + tl.arange(0, block_q), stop)
    most = tl.full((block_q,), -float("inf"), tl.float32)
    state = (tl.zeros((block_q, padded), tl.float32), most, tl.zeros((block_q,), tl.float32))
    keys, values = (k, k_at), (v, v_at)
    state = _visit(
        state, tile, keys, values, first, middle, edge, scale_log2, False,
        causal, has_bounds, has_mask, head_dim, block_k, described,
    )  # fmt: skip
    state = _visit(
        state, tile, keys, values, middle, end, edge, scale_log2, True,
        causal, has_bounds, has_mask, head_dim, block_k, described,
    )  # fmt: skip
    _write(out_ptr, lse_ptr, state, first_row, out_stride_i, q_len, head_dim)
