"""FlashAttention in plain PyTorch, tile by tile: the algorithm itself, forward and backward.

FlashAttention-2 (Dao 2023, arXiv:2307.08691), algorithms 1 and 2. No tensor is larger than a tile of scores or than
what goes in and comes out, so that extra memory grows with the length, not with its square. The query heads that share
a KV head are further rows of a tile; no K or V is repeated. Each tile is taken to float32 (float64 stays).
"""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.kernels.flash_attention.once import differentiable_once
from labkit.kernels.flash_attention.tiles import Tile, tiles

# Queries and keys of a tile. Smaller ones read K and V more often, larger ones hold more scores at a time.
BLOCK_SIZES = (128, 128)


class RowState(NamedTuple):
    """What the online softmax knows of a block of rows after some of their keys.

    acc `(..., rows, head_dim)`: the values so far, weighted by exp(score - most); most `(..., rows)`: the largest score
    so far; total `(..., rows)`: the sum of those weights.
    """

    acc: Tensor
    most: Tensor
    total: Tensor


def empty_state(rows: Tensor) -> RowState:
    """Of queries `(..., rows, head_dim)` that have seen no key."""
    most = rows.new_full(rows.shape[:-1], -torch.inf)
    return RowState(torch.zeros_like(rows), most, torch.zeros_like(most))


def attend_tile(state: RowState, scores: Tensor, values: Tensor) -> RowState:
    """One step of the online softmax (Milakov and Gimelshein 2018, algorithm 3): a tile's `scores (..., rows, keys)`,
    minus infinity where a key is not seen, and its `values (..., keys, head_dim)`."""
    most = torch.maximum(state.most, scores.amax(-1))
    # A row that has seen nothing yet: any finite number in the place of its maximum keeps NaN out.
    at = most.masked_fill(most == -torch.inf, 0.0)
    weights = torch.exp(scores - at[..., None])
    # What was summed under the old maximum shrinks by this much under the new one.
    keep = torch.exp(state.most - at)
    acc = state.acc * keep[..., None] + weights @ values
    return RowState(acc, most, state.total * keep + weights.sum(-1))


def finish(state: RowState) -> tuple[Tensor, Tensor]:
    """The rows' outputs, and the logarithm of their sums of exponentials, which is all that the backward pass needs of
    the softmax. Of a row that saw nothing: zeros and minus infinity."""
    total = state.total.masked_fill(state.total == 0, 1.0)
    # There the maximum is still minus infinity.
    return state.acc / total[..., None], state.most + total.log()


def _rows(x: Tensor, kv_heads: int, start: int, stop: int) -> Tensor:
    """Tokens start to stop of `(batch, heads, q_len, ...)` as rows of their KV head, in float32 or better: `(batch,
    kv_heads, group * tokens, ...)`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tokens = x[:, :, start:stop]
    group = x.shape[1] // kv_heads
    return tokens.reshape(x.shape[0], kv_heads, group * tokens.shape[2], *x.shape[3:]).to(wide)


def _keys_of(x: Tensor, tile: Tile, keys: Tensor | None, wide: torch.dtype) -> Tensor:
    """A tile's keys or values, in `wide`; zeros where they are padding, whatever lies there."""
    part = x[:, :, tile.k_start : tile.k_stop].to(wide)
    return part if keys is None else part.masked_fill(~keys[:, None, tile.k_start : tile.k_stop, None], 0.0)


def tile_scores(q_rows: Tensor, k: Tensor, tile: Tile, causal_offset: int, keys: Tensor | None) -> Tensor:
    """One tile of scaled scores, minus infinity where a key is not seen."""
    scores = q_rows @ _keys_of(k, tile, keys, q_rows.dtype).mT
    if tile.partial:
        place = torch.arange(tile.q_start, tile.q_stop, device=k.device) + causal_offset
        past = torch.arange(tile.k_start, tile.k_stop, device=k.device) > place[:, None]
        scores.masked_fill_(past.repeat(scores.shape[2] // len(place), 1), -torch.inf)
    if keys is not None:
        scores.masked_fill_(~keys[:, None, None, tile.k_start : tile.k_stop], -torch.inf)
    return scores


def tiled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    softmax_scale: float,
    keys: Tensor | None = None,
    block_sizes: tuple[int, int] = BLOCK_SIZES,
) -> tuple[Tensor, Tensor]:
    """Attention, and `lse (batch, num_attention_heads, q_len)`: the natural logarithm of a row's sum of exponentials.

    q `(batch, num_attention_heads, q_len, head_dim)`; k, v `(batch, num_key_value_heads, kv_len, head_dim)`; keys, bool
    `(batch, kv_len)`, False where a key is padding. Causal masks are aligned to the end.
    """
    (batch, heads, q_len, _), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    walk = tiles(q_len, kv_len, block_sizes, causal)
    for (start, stop), row_of_tiles in groupby(walk, key=lambda tile: (tile.q_start, tile.q_stop)):
        q_rows = _rows(q, kv_heads, start, stop) * softmax_scale
        state = empty_state(q_rows)
        for tile in row_of_tiles:
            scores = tile_scores(q_rows, k, tile, kv_len - q_len, keys)
            state = attend_tile(state, scores, _keys_of(v, tile, keys, wide))
        out_rows, lse_rows = finish(state)
        out[:, :, start:stop] = out_rows.view(batch, heads, stop - start, q.shape[3])
        lse[:, :, start:stop] = lse_rows.view(batch, heads, stop - start)
    return out, lse


def tiled_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float,
    keys: Tensor | None = None,
    block_sizes: tuple[int, int] = BLOCK_SIZES,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv. The weights of a tile are made again from q, k and `lse`; with delta = rowsum(dout * out) the
    softmax's derivative needs no other tile: dS = P * (dP - delta)."""
    (q_len, kv_heads, kv_len), wide = (q.shape[2], *k.shape[1:3]), lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    delta = (dout.to(wide) * out.to(wide)).sum(-1)
    # A row that saw nothing has only scores of minus infinity; less any finite number they stay that.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    for tile in tiles(q_len, kv_len, block_sizes, causal):
        at, seen = (tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        q_rows, dout_rows = _rows(q, kv_heads, *at), _rows(dout, kv_heads, *at)
        weights = tile_scores(q_rows * softmax_scale, k, tile, kv_len - q_len, keys)
        weights = weights.sub_(_rows(lse, kv_heads, *at)[..., None]).exp_()
        dv[:, :, seen] += weights.mT @ dout_rows
        dweights = dout_rows @ _keys_of(v, tile, keys, wide).mT
        dscores = weights * (dweights - _rows(delta, kv_heads, *at)[..., None]) * softmax_scale
        dk[:, :, seen] += dscores.mT @ q_rows
        dq_rows = dscores @ _keys_of(k, tile, keys, wide)
        dq[:, :, tile.q_start : tile.q_stop] += dq_rows.view(*q.shape[:2], tile.q_stop - tile.q_start, q.shape[3])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class TiledAttention(torch.autograd.Function):
    """`tiled_forward`, differentiable. For the backward pass it keeps q, k, v, the output and one number a row."""

    @staticmethod
    def forward(ctx, q, k, v, causal, softmax_scale, keys, block_sizes):
        out, lse = tiled_forward(q, k, v, causal, softmax_scale, keys, block_sizes)
        ctx.save_for_backward(q, k, v, out, lse, keys)
        ctx.options = (causal, softmax_scale, block_sizes)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        q, k, v, out, lse, keys = ctx.saved_tensors
        causal, softmax_scale, block_sizes = ctx.options
        grads = tiled_backward(dout, q, k, v, out, lse, causal, softmax_scale, keys, block_sizes)
        return *grads, None, None, None, None
