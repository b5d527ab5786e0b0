"""Attention of the few new queries of a decode step to a cache: dense or quantized, contiguous or in blocks.

"triton" is split-KV flash decoding, which reads K and V once for all query heads of a KV head, blocks and codes where
they lie. "torch" takes a chunk of tokens at a time, or PyTorch's own kernel where nothing has to be dequantized or
gathered. "reference" is the definition in float32.
"""

import math

import torch

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice, why_no_triton
from labkit.kernels.decode_attention import chunked
from labkit.kernels.decode_attention.reference import decode_attention_reference
from labkit.kernels.kv_types import QuantizedKV

BACKENDS = ("triton", "torch", "reference")
KV = torch.Tensor | QuantizedKV
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

__all__ = ["BACKENDS", "choose", "decode_attention"]


def _check_kv(q: torch.Tensor, k: KV, v: KV, table: torch.Tensor | None) -> None:
    for name, value in (("k", k), ("v", v)):
        _check.require(isinstance(value, KV), name, type(value).__name__, "a torch.Tensor or a QuantizedKV")
        if isinstance(value, torch.Tensor):
            _check.tensor(name, value, ndim=4, dtypes=(q.dtype,))
        _check.require(value.device == q.device, name, f"on {value.device}", f"{q.device}, where q is")
        fits = value.shape[3] == q.shape[3] and value.shape[1] > 0 and q.shape[1] % value.shape[1] == 0
        takes = f"a number of heads that divides q's {q.shape[1]}, of {q.shape[3]} channels"
        _check.require(fits, name, f"shape {tuple(value.shape)}", takes)
        rows = table is not None or value.shape[0] == q.shape[0]
        _check.require(rows, name, f"{value.shape[0]} rows", f"{q.shape[0]}, as q has, without a block_table")
    same = type(k) is type(v) and tuple(k.shape) == tuple(v.shape)
    _check.require(same, "v", f"{type(v).__name__} {tuple(v.shape)}", f"what k is: {type(k).__name__} {tuple(k.shape)}")
    if isinstance(k, QuantizedKV):
        _check_recent(q, k, v)


def _check_recent(q: torch.Tensor, k: QuantizedKV, v: QuantizedKV) -> None:
    """K and V hold the same tokens in codes. Comparing the counts would wait for a GPU: there they are one tensor."""
    a, b = k.n_quantized, v.n_quantized
    same = (a is None) == (b is None)
    if same and a is not None and a is not b:
        same = a.data_ptr() == b.data_ptr() if a.is_cuda else torch.equal(a, b)
    _check.require(same, "v.n_quantized", "other tokens than k has in codes", "k.n_quantized, the same tensor on a GPU")
    if a is None:
        return
    for name, recent in (("k.recent", k.recent), ("v.recent", v.recent)):
        fits = recent.shape[0] == q.shape[0] and recent.dtype is q.dtype and recent.shape == k.recent.shape
        got = f"shape {tuple(recent.shape)} in {recent.dtype}"
        _check.require(fits, name, got, f"({q.shape[0]}, {k.shape[1]}, room, {q.shape[3]}) in {q.dtype}")


def _check_all(
    q: torch.Tensor, k: KV, v: KV, lengths: torch.Tensor, table: torch.Tensor | None, tree_mask: torch.Tensor | None
) -> None:
    """Refuse what does not fit together, without looking at a value on a GPU."""
    _check.tensor("q", q, ndim=4, dtypes=_FLOATS)
    _check.require(q.shape[3] > 0, "q", f"shape {tuple(q.shape)}", "a head_dim of at least 1")
    if table is not None:
        _check.tensor("block_table", table, ndim=2, dtypes=(torch.int32,))
        _check.require(table.shape[0] == q.shape[0], "block_table", f"{table.shape[0]} rows", f"{q.shape[0]}, as q has")
    _check_kv(q, k, v, table)
    _check.tensor("cache_seqlens", lengths, ndim=1, dtypes=(torch.int32,))
    rows = lengths.shape[0]
    _check.require(rows == q.shape[0], "cache_seqlens", f"{rows} rows", f"{q.shape[0]}, as q has")
    for name, value in (("cache_seqlens", lengths), ("block_table", table), ("tree_mask", tree_mask)):
        same = value is None or value.device == q.device
        _check.require(same, name, f"on {getattr(value, 'device', None)}", f"{q.device}, where q is")
    if tree_mask is not None:
        _check.tensor("tree_mask", tree_mask, ndim=2, dtypes=(torch.bool,))
        shape, takes = tuple(tree_mask.shape), (q.shape[2], q.shape[2])
        _check.require(shape == takes, "tree_mask", f"shape {shape}", f"(q_len, q_len), {takes}")
    if not q.is_cuda:
        _check_lengths(k, lengths, table)


def _check_lengths(k: KV, lengths: torch.Tensor, table: torch.Tensor | None) -> None:
    """No row is longer than what there is to read, and every block that is read exists."""
    if not lengths.numel():
        return
    held = k.shape[2] * (1 if table is None else table.shape[1])
    counts = k.n_quantized if isinstance(k, QuantizedKV) and k.recent is not None else lengths
    room = held if counts is lengths else torch.minimum(counts, lengths) + k.recent.shape[2]
    fits = bool(((lengths >= 0) & (lengths <= room)).all()) and bool((torch.minimum(counts, lengths) <= held).all())
    takes = f"0 to the tokens that k holds: {held} in blocks or codes, and then what its recent part has room for"
    _check.require(fits, "cache_seqlens", lengths.tolist(), takes)
    if table is None or not table.numel():
        return
    columns = torch.arange(table.shape[1], device=table.device)
    read = columns * k.shape[2] < torch.minimum(counts, lengths)[:, None]
    known = ((table >= 0) & (table < k.shape[0])) | ~read
    takes = f"ids from 0 to {k.shape[0] - 1} for every block that holds a row's tokens"
    _check.require(bool(known.all()), "block_table", table.tolist(), takes)


def choose(q: torch.Tensor, k: KV, v: KV) -> Choice:
    """As `choose_backend("decode_attention", q, k, v)`."""
    _check.tensor("q", q, ndim=4, dtypes=_FLOATS)
    reason = _why_not_triton(q, k, v)
    if reason is None and q.device.type != "cuda":
        reason = "its interpreter runs for backend='triton' alone"
    if reason is None:
        return Choice("triton", "split-KV flash decoding")
    return Choice(
        "torch", f"a chunk of tokens at a time, or PyTorch's own kernel; the Triton kernel does not: {reason}"
    )


def _why_not_triton(q: torch.Tensor, k: KV, v: KV) -> str | None:
    if reason := why_no_triton(q.device):
        return reason
    from labkit.kernels.decode_attention import launch as room

    return room.why_not(q, k, v)


def _torch(q, k, v, lengths: torch.Tensor, table, softmax_scale: float, tree_mask) -> torch.Tensor:
    """PyTorch's own kernel where rows are known, without waiting, to be of one length in contiguous tensors."""
    plain = isinstance(k, torch.Tensor) and table is None and tree_mask is None and not q.is_cuda
    if plain and q.numel():
        shortest, longest = (int(length) for length in lengths.aminmax())
        if shortest == longest >= q.shape[2] > 0:
            return chunked.library(q, k, v, longest, softmax_scale)
    return chunked.chunked(q, k, v, lengths, table, softmax_scale, tree_mask)


def decode_attention(
    q: torch.Tensor,
    k: KV,
    v: KV,
    cache_seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    tree_mask: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention of `q (batch, num_attention_heads, q_len, head_dim)` to a cache, `(batch, heads, q_len, head_dim)`.

    k, v: tensors of q's dtype or `QuantizedKV`, `(batch, num_key_value_heads, length, head_dim)`, or with
    `block_table`, int32 `(batch, max_blocks)`, `(num_blocks, num_key_value_heads, block_size, head_dim)`.
    cache_seqlens: int32 `(batch,)`, tokens of each row, the q_len new ones, which are in the cache already, among
    them; query i stands at cache_seqlens - q_len + i and sees all before it and itself. With `tree_mask`, bool `(q_len,
    q_len)`, it sees all before the new ones, and of those what is True in its row. A query that sees nothing gives
    zeros. Blocks past a row's length are never read: their ids may be anything. softmax_scale: 1 / sqrt(head_dim)
    where not given. On a GPU no value of cache_seqlens or block_table is looked at, so that nothing waits: they have
    to be right.
    Errors: ValueError for what does not fit together; BackendUnavailable where a backend asked for by name cannot run.
    """
    _check_all(q, k, v, cache_seqlens, block_table, tree_mask)
    if not q.numel():
        return torch.empty_like(q)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else _check.number("softmax_scale", softmax_scale)
    arguments = (q, k, v, cache_seqlens, block_table, scale, tree_mask)
    if backend == "auto":
        backend = choose(q, k, v).name if q.is_cuda else "torch"
    if backend == "torch":
        return _torch(*arguments)
    if backend == "triton":
        if reason := _why_not_triton(q, k, v):
            raise BackendUnavailable(f"decode_attention: backend 'triton' cannot run: {reason}")
        from labkit.kernels.decode_attention import launch as room

        return room.attend(*arguments)
    _check.choice("backend", backend, ("auto", *BACKENDS))
    return decode_attention_reference(*arguments)
