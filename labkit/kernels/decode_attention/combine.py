"""The second kernel of split-KV decoding: the splits' results into one, in a fixed order."""

import triton
import triton.language as tl

# Splits that are read together.
COMBINED_AT_ONCE = 8


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine_kernel(
    parts_ptr,  # (splits, rows, head_dim), float32
    sums_ptr,  # (splits, rows), float32
    out_ptr,  # (rows, head_dim)
    rows,
    splits,
    head_dim: tl.constexpr,
    head_dim_p: tl.constexpr,
    splits_p: tl.constexpr,
    at_once: tl.constexpr,
):
    """Splits in their order, whichever ended first; one that saw nothing wrote nothing and is not read."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, head_dim_p)
    every = tl.arange(0, splits_p)
    sums = tl.load(sums_ptr + every * rows + row, mask=every < splits, other=-float("inf"))
    most = tl.max(sums, axis=0)
    most = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(tl.exp2(sums - most), axis=0)
    acc = tl.zeros((head_dim_p,), tl.float32)
    for first in range(0, splits, at_once):
        part = first + tl.arange(0, at_once)
        some = tl.load(sums_ptr + part * rows + row, mask=part < splits, other=-float("inf"))
        inside = (some != -float("inf"))[:, None] & (j < head_dim)[None, :]
        values = tl.load(parts_ptr + (part * rows + row)[:, None] * head_dim + j[None, :], mask=inside, other=0.0)
        acc += tl.sum(values * tl.exp2(some - most)[:, None], axis=0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * head_dim + j, acc.to(out_ptr.dtype.element_ty), mask=j < head_dim)
