"""The backward pass of FlashAttention-2 (Dao, 2023, algorithm 2), in Triton: the weights are worked out again from q, k
and the logarithm of each query's sum, and are never in memory.

One kernel for dK and dV, one for dQ, so that each tile of a gradient has one owner that adds in a fixed order: the same
input gives the same bits every time, and the query heads of a KV head need no copies and no atomics. That costs the
scores and dP = dO V^T twice: 7 products a tile instead of 5.

What is transposed: the kernel for dK and dV works with S^T = K Q^T, so that P^T and dS^T come out of one product in the
registers that the next one takes them from, as its left operand.
"""

import triton
import triton.language as tl

from labkit.kernels.flash_attention.triton import _tile


@triton.jit
def _store(ptr, first, stride, inside, x, width: tl.constexpr):
    """Write what `_tile` would read."""
    i, j = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    at = ptr + first.to(tl.int64) * stride + (i[:, None] * stride + j[None, :])
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside[:, None] & (j < width)[None, :])


@triton.jit
def _head(x, batch, head, stride_b, stride_h, stride_i, described: tl.constexpr):
    """One head of what `x` points to or describes, and where in it: as `_tile` takes them."""
    if described:
        return x, (batch.to(tl.int32), head.to(tl.int32), 0)
    else:
        return x + batch * stride_b + head * stride_h, (0, 0, stride_i)


@triton.jit
def _bounds(bounds_ptr, batch, kv_len, has_bounds: tl.constexpr):
    """The first key that is no padding and one past the last."""
    if has_bounds:
        first, last = tl.load(bounds_ptr + 2 * batch), tl.load(bounds_ptr + 2 * batch + 1)
        return tl.maximum(first, 0), tl.minimum(last, kv_len)
    else:
        return tl.full((), 0, tl.int32), kv_len


@triton.jit
def _no_padding(mask_ptr, keys, first, last, has_mask: tl.constexpr):
    """Of each key, whether it lies within the bounds and is no padding."""
    inside = (keys >= first) & (keys < last)
    if has_mask:
        inside = inside & (tl.load(mask_ptr + keys, mask=inside, other=0) != 0)
    return inside


@triton.jit(do_not_specialize=["heads", "q_len"])
def _delta_kernel(
    out_ptr,  # (batch, heads, q_len, head_dim)
    dout_ptr,
    delta_ptr,  # (batch, heads, q_len), float32, contiguous
    heads,
    q_len,
    out_stride_b,
    out_stride_h,
    out_stride_i,
    dout_stride_b,
    dout_stride_h,
    dout_stride_i,
    head_dim: tl.constexpr,
    head_dim_p: tl.constexpr,
    rows: tl.constexpr,
):
    """rowsum(dO * O), which is what rowsum(P * dP) comes to."""
    blocks = tl.cdiv(q_len, rows)
    row, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * rows
    batch, head = row // heads, row % heads
    i = first + tl.arange(0, rows)
    out_ptr += batch * out_stride_b + head * out_stride_h
    dout_ptr += batch * dout_stride_b + head * dout_stride_h
    out = _tile(out_ptr, (0, 0, out_stride_i), first, i < q_len, False, rows, head_dim, head_dim_p)
    dout = _tile(dout_ptr, (0, 0, dout_stride_i), first, i < q_len, False, rows, head_dim, head_dim_p)
    tl.store(delta_ptr + row * q_len + i, tl.sum(out.to(tl.float32) * dout.to(tl.float32), axis=1), mask=i < q_len)


@triton.jit
def _add_queries(
    dk,
    dv,
    k,
    v,
    queries,
    first,
    q_len,
    places,
    scale_log2,
    block_q: tl.constexpr,
    width: tl.constexpr,
    edge: tl.constexpr,
    causal: tl.constexpr,
    described: tl.constexpr,
):
    """dK and dV with what a block of queries from `first` on adds. `places`: of the keys, in queries' numbers.

    A key that is padding gets a number without meaning here, possibly NaN, in its own row alone; and a query that saw
    nothing can only reach such keys."""
    q_ptr, dout_ptr, lse_ptr, delta_ptr, q_at, dout_at = queries
    i = first + tl.arange(0, block_q)
    inside = i < q_len if edge else None
    q = _tile(q_ptr, q_at, first, inside, described, block_q, width, k.shape[1])
    dout = _tile(dout_ptr, dout_at, first, inside, described, block_q, width, k.shape[1])
    scores = tl.dot(k, tl.trans(q))
    dp = tl.dot(v, tl.trans(dout))
    lse = tl.load(lse_ptr + i, mask=inside, other=float("inf") if edge else None)
    p = tl.exp2(scores * scale_log2 - lse[None, :])
    if edge and causal:
        p = tl.where(places[:, None] <= i[None, :], p, 0.0)
    dv = tl.dot(p.to(dout.dtype), dout, dv)
    delta = tl.load(delta_ptr + i, mask=inside, other=0.0 if edge else None)
    ds = p * (dp - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk), dv


@triton.jit(do_not_specialize=["kv_heads", "q_len", "kv_len"])
def _dk_dv_kernel(
    q,  # (batch, heads, q_len, head_dim): a pointer, or a descriptor of (1, 1, block_q, head_dim_p)
    k,  # (batch, kv_heads, kv_len, head_dim): the same, of (1, 1, block_k, head_dim_p)
    v,
    dout,  # as q
    lse_ptr,  # (batch, heads, q_len), float32, contiguous, base 2
    delta_ptr,
    bounds_ptr,  # (batch, 2), int32
    mask_ptr,  # (batch, kv_len), bool
    dk_ptr,  # as k
    dv_ptr,
    softmax_scale,
    scale_log2,
    kv_heads,
    q_len,
    kv_len,
    q_stride_b,
    q_stride_h,
    q_stride_i,
    k_stride_b,
    k_stride_h,
    k_stride_i,
    v_stride_b,
    v_stride_h,
    v_stride_i,
    dout_stride_b,
    dout_stride_h,
    dout_stride_i,
    dk_stride_b,
    dk_stride_h,
    dk_stride_i,
    dv_stride_b,
    dv_stride_h,
    dv_stride_i,
    heads_each: tl.constexpr,  # query heads a KV head
    causal: tl.constexpr,
    has_bounds: tl.constexpr,
    has_mask: tl.constexpr,
    head_dim: tl.constexpr,
    head_dim_p: tl.constexpr,  # a power of two
    described: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    blocks = tl.cdiv(kv_len, block_k)
    # With a causal mask the first keys are seen by the most queries: they start first.
    row, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * block_k
    batch, head = row // kv_heads, row % kv_heads
    lo, hi = _bounds(bounds_ptr, batch, kv_len, has_bounds)
    keys = first + tl.arange(0, block_k)
    k, k_at = _head(k, batch, head, k_stride_b, k_stride_h, k_stride_i, described)
    v, v_at = _head(v, batch, head, v_stride_b, v_stride_h, v_stride_i, described)
    k = _tile(k, k_at, first, keys < kv_len, described, block_k, head_dim, head_dim_p)
    v = _tile(v, v_at, first, keys < kv_len, described, block_k, head_dim, head_dim_p)
    dk, dv = tl.zeros((block_k, head_dim_p), tl.float32), tl.zeros((block_k, head_dim_p), tl.float32)
    # Blocks of queries: `cut` by the mask, then `whole` ones, then one that may reach past the end.
    places, start, cut = keys + q_len - kv_len, 0, 0
    if causal:
        start = tl.maximum(tl.maximum(first, lo) + q_len - kv_len, 0)
        cut = tl.cdiv(tl.maximum(first + block_k - 1 + q_len - kv_len - start, 0), block_q)
    here = (first < hi) & (first + block_k > lo) & (start < q_len)
    count = tl.where(here, tl.cdiv(q_len - start, block_q), 0)
    whole = tl.maximum(tl.where(here, (q_len - start) // block_q, 0) - cut, 0)
    for each in range(heads_each):
        q_head = head * heads_each + each
        at = (batch * kv_heads * heads_each + q_head) * q_len
        q_each, q_at = _head(q, batch, q_head, q_stride_b, q_stride_h, q_stride_i, described)
        dout_each, dout_at = _head(dout, batch, q_head, dout_stride_b, dout_stride_h, dout_stride_i, described)
        queries = (q_each, dout_each, lse_ptr + at, delta_ptr + at, q_at, dout_at)
        # What the mask compares, moved out of the loop, would not fit into registers.
        for t in tl.range(count - whole, disable_licm=True):
            i = start + tl.where(t < cut, t, t + whole) * block_q
            dk, dv = _add_queries(
                dk, dv, k, v, queries, i, q_len, places, scale_log2, block_q, head_dim, True, causal, described
            )
        for t in range(whole):
            i = start + (cut + t) * block_q
            dk, dv = _add_queries(
                dk, dv, k, v, queries, i, q_len, places, scale_log2, block_q, head_dim, False, causal, described
            )
    seen = _no_padding(mask_ptr + batch * kv_len, keys, lo, hi, has_mask)[:, None]
    dk_ptr += batch * dk_stride_b + head * dk_stride_h
    dv_ptr += batch * dv_stride_b + head * dv_stride_h
    _store(dk_ptr, first, dk_stride_i, keys < kv_len, tl.where(seen, dk * softmax_scale, 0.0), head_dim)
    _store(dv_ptr, first, dv_stride_i, keys < kv_len, tl.where(seen, dv, 0.0), head_dim)


@triton.jit
def _add_keys(
    dq,
    q,
    dout,
    lse,
    delta,
    keys_values,
    first,
    lo,
    hi,
    places,
    scale_log2,
    block_k: tl.constexpr,
    width: tl.constexpr,
    edge: tl.constexpr,
    causal: tl.constexpr,
    has_mask: tl.constexpr,
    described: tl.constexpr,
):
    """dQ with what a block of keys from `first` on adds. `places`: of the queries, in keys' numbers.

    Of a query that saw nothing `lse` is minus infinity, and each weight infinite: all of its dS are masked."""
    k_ptr, v_ptr, mask_ptr, k_at, v_at = keys_values
    j = first + tl.arange(0, block_k)
    # What padding holds is not read, for zero times NaN is not zero.
    inside = _no_padding(mask_ptr, j, lo, hi, has_mask) if edge else None
    k = _tile(k_ptr, k_at, first, inside, described, block_k, width, q.shape[1])
    v = _tile(v_ptr, v_at, first, inside, described, block_k, width, q.shape[1])
    scores = tl.dot(q, tl.trans(k))
    dp = tl.dot(dout, tl.trans(v))
    p = tl.exp2(scores * scale_log2 - lse[:, None])
    ds = p * (dp - delta[:, None])
    if edge:
        sees = inside[None, :]
        if causal:
            sees = sees & (j[None, :] <= places[:, None])
        ds = tl.where(sees, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["kv_heads", "q_len", "kv_len"])
def _dq_kernel(
    q,  # (batch, heads, q_len, head_dim): a pointer, or a descriptor of (1, 1, block_q, head_dim_p)
    k,  # (batch, kv_heads, kv_len, head_dim): the same, of (1, 1, block_k, head_dim_p)
    v,
    dout,  # as q
    lse_ptr,  # (batch, heads, q_len), float32, contiguous, base 2
    delta_ptr,
    bounds_ptr,  # (batch, 2), int32
    mask_ptr,  # (batch, kv_len), bool
    dq_ptr,  # as q
    softmax_scale,
    scale_log2,
    kv_heads,
    q_len,
    kv_len,
    q_stride_b,
    q_stride_h,
    q_stride_i,
    k_stride_b,
    k_stride_h,
    k_stride_i,
    v_stride_b,
    v_stride_h,
    v_stride_i,
    dout_stride_b,
    dout_stride_h,
    dout_stride_i,
    dq_stride_b,
    dq_stride_h,
    dq_stride_i,
    heads_each: tl.constexpr,
    causal: tl.constexpr,
    has_bounds: tl.constexpr,
    has_mask: tl.constexpr,
    head_dim: tl.constexpr,
    head_dim_p: tl.constexpr,
    described: tl.constexpr,
    block_q: tl.constexpr,
    block_k: tl.constexpr,
):
    blocks = tl.cdiv(q_len, block_q)
    # With a causal mask the last queries see the most keys: they start first.
    row, first = (tl.program_id(0) // blocks).to(tl.int64), (blocks - 1 - tl.program_id(0) % blocks) * block_q
    batch, head = row // (kv_heads * heads_each), row % (kv_heads * heads_each)
    kv_head = head // heads_each
    lo, hi = _bounds(bounds_ptr, batch, kv_len, has_bounds)
    i = first + tl.arange(0, block_q)
    inside, places = i < q_len, i + kv_len - q_len
    q, q_at = _head(q, batch, head, q_stride_b, q_stride_h, q_stride_i, described)
    dout, dout_at = _head(dout, batch, head, dout_stride_b, dout_stride_h, dout_stride_i, described)
    q = _tile(q, q_at, first, inside, described, block_q, head_dim, head_dim_p)
    dout = _tile(dout, dout_at, first, inside, described, block_q, head_dim, head_dim_p)
    lse = tl.load(lse_ptr + row * q_len + i, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + row * q_len + i, mask=inside, other=0.0)
    k, k_at = _head(k, batch, kv_head, k_stride_b, k_stride_h, k_stride_i, described)
    v, v_at = _head(v, batch, kv_head, v_stride_b, v_stride_h, v_stride_i, described)
    keys_values = (k, v, mask_ptr + batch * kv_len, k_at, v_at)
    # Keys before `whole` are seen by each of these queries, those before `hi` by any.
    whole = hi
    if causal:
        hi = tl.minimum(hi, tl.minimum(first + block_q, q_len) + kv_len - q_len)
        whole = tl.minimum(hi, first + 1 + kv_len - q_len)
    count = tl.cdiv(tl.maximum(hi - lo, 0), block_k)
    whole = 0 if has_mask else tl.maximum(whole - lo, 0) // block_k
    dq = tl.zeros((block_q, head_dim_p), tl.float32)
    state = (q, dout, lse, delta, keys_values)
    for t in range(whole):
        j = lo + t * block_k
        dq = _add_keys(
            dq, *state, j, lo, hi, places, scale_log2, block_k, head_dim, False,
            causal, has_mask, described,
        )  # fmt: skip
    for t in range(whole, count):
        j = lo + t * block_k
        dq = _add_keys(
            dq, *state, j, lo, hi, places, scale_log2, block_k, head_dim, True,
            causal, has_mask, described,
        )  # fmt: skip
    dq_ptr += batch * dq_stride_b + head * dq_stride_h
    _store(dq_ptr, first, dq_stride_i, inside, dq * softmax_scale, head_dim)
