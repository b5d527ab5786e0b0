"""The definition of attention to a cache: row by row, over that row's own tokens."""

import dataclasses

import torch

from labkit.kernels.kv_types import QuantizedKV


def _tokens(x: torch.Tensor | QuantizedKV, row: int, length: int, table: torch.Tensor | None, wide: torch.dtype):
    """The first `length` tokens of one row, `(kv_heads, length, head_dim)`."""
    if isinstance(x, QuantizedKV):
        n = length if x.n_quantized is None else min(length, int(x.n_quantized[row]))
        blocks = _blocks(x.codes, row, n, table)
        parts = {name: getattr(x, name)[blocks] for name in ("codes", "scales", "minimums")}
        codes = dataclasses.replace(x, recent=None, n_quantized=None, **parts).dequantize(wide)
        old = codes.transpose(0, 1).flatten(1, 2)[:, :n]
        return old if n == length else torch.cat((old, x.recent[row, :, : length - n].to(wide)), dim=1)
    return x[_blocks(x, row, length, table)].transpose(0, 1).flatten(1, 2)[:, :length].to(wide)


def _blocks(x: torch.Tensor, row: int, length: int, table: torch.Tensor | None) -> list[int]:
    return [row] if table is None else table[row, : -(-length // x.shape[2])].tolist()


def decode_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor | QuantizedKV,
    v: torch.Tensor | QuantizedKV,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v over what each query sees, in float32 or better; zeros where it sees nothing."""
    wide, q_len = torch.promote_types(q.dtype, torch.float32), q.shape[2]
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    old = torch.ones(q_len, q_len, dtype=torch.bool, device=q.device)
    new = old.tril() if tree_mask is None else tree_mask
    for row, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_tokens(x, row, length, block_table, wide) for x in (k, v))
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[0], dim=0) for x in (keys, values))
        before = max(0, length - q_len)
        sees = torch.cat((old[:, :1].expand(-1, before), new[:, q_len - (length - before) :]), dim=1)
        scores = (q[row].to(wide) @ keys.transpose(1, 2) * softmax_scale).masked_fill(~sees, -torch.inf)
        # Where a query sees nothing, softmax gives NaN.
        out[row] = scores.softmax(-1).masked_fill(~sees, 0.0) @ values
    return out.to(q.dtype)
