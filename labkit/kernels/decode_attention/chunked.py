"""Attention to a cache in PyTorch, a chunk of tokens at a time with an online softmax (Milakov and Gimelshein, 2018).

What has to be dequantized or gathered is, for one chunk; K and V are never repeated over query heads. A key's minimum
is left out of what is dequantized, where its group runs along the tokens: q . minimum is the same for all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.kernels.kv_types import QuantizedKV, unpack_codes

# Of more tokens than the most, what is dequantized of them would not stay in a core's own cache.
_MOST, _LEAST, _SHARE = 1024, 16, 2


@dataclass(frozen=True)
class Piece:
    """Tokens `offset` to `offset + size` of each of `blocks` neighbouring columns of the block table, from `first`."""

    first: int
    blocks: int
    offset: int
    size: int


def chunk_size(length: int) -> int:
    """Tokens at a time: at most 1024, and half of the cache once it has 32."""
    size = min(_MOST, max(_LEAST, length // _SHARE))
    return 1 << (size.bit_length() - 1)


def pieces(length: int, columns: int, block_size: int, group_size: int) -> Iterator[Piece]:
    """What `length` tokens in blocks of `block_size` are cut into; at whole groups where a chunk holds some."""
    limit = chunk_size(length)
    used = min(columns, -(-length // block_size) if block_size else 0)
    if block_size <= limit:
        step = limit // max(1, block_size)
        for first in range(0, used, step):
            yield Piece(first, min(step, used - first), 0, block_size)
        return
    limit = max(group_size, limit // group_size * group_size) if group_size <= limit else limit
    for first in range(used):
        end = min(block_size, length - first * block_size)
        # Whole groups at the end too: what lies past the length is masked.
        end = min(block_size, -(-end // group_size) * group_size)
        for offset in range(0, end, limit):
            yield Piece(first, 1, offset, min(limit, end - offset))


def _take(x: torch.Tensor, table: torch.Tensor | None, piece: Piece, begin: int, end: int) -> torch.Tensor:
    """`x (n, kv_heads, block_size, width)` to the piece's `(batch, kv_heads, blocks * (end - begin), width)`."""
    x = x[:, :, begin:end]
    if table is None:
        return x
    # Where a row has no block its id may be anything; what is read there is masked.
    ids = table[:, piece.first : piece.first + piece.blocks].clamp(0, x.shape[0] - 1)
    taken = x.index_select(0, ids.flatten()).unflatten(0, ids.shape)
    return taken[:, 0] if piece.blocks == 1 else taken.transpose(1, 2).flatten(2, 3)


def _grids(x: QuantizedKV, table: torch.Tensor | None, piece: Piece, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Scales and minimums of a piece, in `wide`."""
    begin, end = piece.offset, piece.offset + piece.size
    if x.axis == "channel":
        begin, end = begin // x.group_size, -(-end // x.group_size)
    return tuple(_take(grid, table, piece, begin, end).to(wide) for grid in (x.scales, x.minimums))


def _codes(x: QuantizedKV, table: torch.Tensor | None, piece: Piece, wide: torch.dtype) -> torch.Tensor:
    codes = _take(x.codes, table, piece, piece.offset, piece.offset + piece.size)
    return unpack_codes(codes, x.bits, wide)


def _whole_groups(x: QuantizedKV, piece: Piece) -> bool:
    return piece.offset % x.group_size == 0 and piece.size % x.group_size == 0


def _values(x: torch.Tensor | QuantizedKV, table: torch.Tensor | None, piece: Piece, wide: torch.dtype) -> torch.Tensor:
    """The piece in `wide`, `(batch, kv_heads, tokens, head_dim)`."""
    if not isinstance(x, QuantizedKV):
        return _take(x, table, piece, piece.offset, piece.offset + piece.size).to(wide)
    codes, (scales, minimums) = _codes(x, table, piece, wide), _grids(x, table, piece, wide)
    if x.axis == "token":
        codes = codes.unflatten(3, (-1, x.group_size))
        return codes.mul_(scales[..., None]).add_(minimums[..., None]).flatten(3)
    if _whole_groups(x, piece):
        codes = codes.unflatten(2, (-1, x.group_size))
        return codes.mul_(scales.unsqueeze(3)).add_(minimums.unsqueeze(3)).flatten(2, 3)
    # Groups larger than a chunk: the piece lies in one block.
    tokens = torch.arange(piece.offset, piece.offset + piece.size, device=codes.device)
    group = tokens // x.group_size - piece.offset // x.group_size
    return codes.mul_(scales.index_select(2, group)).add_(minimums.index_select(2, group))


def _scores(q: torch.Tensor, x: torch.Tensor | QuantizedKV, table: torch.Tensor | None, piece: Piece) -> torch.Tensor:
    """`q (batch, kv_heads, rows, head_dim)` times the piece's keys, `(batch, kv_heads, rows, tokens)`."""
    if not isinstance(x, QuantizedKV) or x.axis == "token" or not _whole_groups(x, piece):
        return q @ _values(x, table, piece, q.dtype).transpose(2, 3)
    codes = _codes(x, table, piece, q.dtype).unflatten(2, (-1, x.group_size))
    scales, minimums = _grids(x, table, piece, q.dtype)
    # Scaling some codes for few rows of queries is less than one small product for each group.
    scores = (q @ codes.mul_(scales.unsqueeze(3)).flatten(2, 3).transpose(2, 3)).unflatten(3, (-1, x.group_size))
    return scores.add_((q @ minimums.transpose(2, 3)).unsqueeze(4)).flatten(3)


class _Softmax:
    """The largest score so far, the sum of weights and the weighted sum of values, each beside it."""

    def __init__(self, q: torch.Tensor) -> None:
        self.most = q.new_full((*q.shape[:3], 1), -torch.inf)
        self.total, self.out = torch.zeros_like(self.most), torch.zeros_like(q)

    def add(self, scores: torch.Tensor, sees: torch.Tensor | None, values: torch.Tensor) -> None:
        """`sees (batch, 1, rows, tokens)`: whatever lies where nothing is seen, NaN too, counts for nothing. None:
        every row sees every token."""
        if sees is not None:
            scores = scores.masked_fill(~sees, -torch.inf)
            values = values.masked_fill(~sees.any(2).unsqueeze(3), 0.0)
        most = torch.maximum(self.most, scores.amax(-1, keepdim=True))
        # Nothing seen so far: any finite number keeps NaN out.
        at = most if sees is None else most.masked_fill(most == -torch.inf, 0.0)
        weights, keep = torch.exp(scores - at), torch.exp(self.most - at)
        self.total = self.total * keep + weights.sum(-1, keepdim=True)
        self.out = self.out * keep + weights @ values
        self.most = most

    def result(self) -> torch.Tensor:
        return self.out / self.total.masked_fill(self.total == 0, 1.0)


@dataclass(frozen=True)
class _Rows:
    """Which tokens the rows of queries see. Rows are query heads of one KV head, each with its `q_len` queries."""

    lengths: torch.Tensor  # (batch,)
    q_len: int
    n_heads: int
    tree_mask: torch.Tensor | None

    @property
    def old(self) -> torch.Tensor:
        """`(batch,)`: the tokens, from the first on, that every query of a row sees."""
        return self.lengths - self.q_len + (self.tree_mask is None)

    def see(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens (batch or 1, n)` to `(batch, 1, rows, n)`."""
        first_new = (self.lengths - self.q_len)[:, None, None]
        place = torch.arange(self.q_len, device=tokens.device)[:, None]
        new = tokens[:, None] - first_new  # (batch, 1, n), from 0 on for the new tokens
        if self.tree_mask is None:
            sees = new <= place
        else:
            among = self.tree_mask[:, new.squeeze(1).clamp(0, self.q_len - 1)].transpose(0, 1)
            sees = (new < 0) | (among & (new < self.q_len))
        return sees.repeat(1, self.n_heads, 1).unsqueeze(1)


def _seen_by_all(counts: torch.Tensor, old: torch.Tensor) -> int:
    """How many tokens, from the first on, each query of each row sees; 0 where reading that would wait for a GPU."""
    return 0 if counts.is_cuda else int(torch.minimum(counts, old).min())


def _longest(counts: torch.Tensor, room: int) -> int:
    """The largest, where reading it does not wait for a GPU; else all there is room for."""
    return room if counts.is_cuda else min(room, max(0, int(counts.max())))


def _add_codes(state: _Softmax, q, k, v, table: torch.Tensor | None, counts: torch.Tensor, rows: _Rows) -> None:
    """Tokens 0 to `counts (batch,)` of each row, out of tensors or codes."""
    columns, block_size = (1 if table is None else table.shape[1]), k.shape[2]
    length = _longest(counts, columns * block_size)
    groups = [x.group_size for x in (k, v) if isinstance(x, QuantizedKV) and x.axis == "channel"]
    unmasked = _seen_by_all(counts, rows.old)
    for piece in pieces(length, columns, block_size, max(groups, default=1)):
        sees = None
        if (piece.first + piece.blocks - 1) * block_size + piece.offset + piece.size > unmasked:
            inside = torch.arange(piece.offset, piece.offset + piece.size, device=q.device)
            starts = torch.arange(piece.first, piece.first + piece.blocks, device=q.device) * block_size
            tokens = (starts[:, None] + inside).flatten()[None]
            sees = rows.see(tokens) & (tokens < counts[:, None])[:, None, None]
        state.add(_scores(q, k, table, piece), sees, _values(v, table, piece, q.dtype))


def _add_recent(state: _Softmax, q, k: QuantizedKV, v: QuantizedKV, counts: torch.Tensor, rows: _Rows) -> None:
    """What follows the first `counts (batch,)` tokens of each row, in full precision."""
    room = k.recent.shape[2]
    length, unmasked = _longest(rows.lengths - counts, room), _seen_by_all(rows.lengths - counts, rows.old - counts)
    for begin in range(0, length, chunk_size(length)):
        end, sees = min(length, begin + chunk_size(length)), None
        if end > unmasked:
            tokens = counts[:, None] + torch.arange(begin, end, device=q.device)
            sees = rows.see(tokens) & (tokens < rows.lengths[:, None])[:, None, None]
        keys, values = (x.recent[:, :, begin:end].to(q.dtype) for x in (k, v))
        state.add(q @ keys.transpose(2, 3), sees, values)


def chunked(
    q: torch.Tensor,
    k: torch.Tensor | QuantizedKV,
    v: torch.Tensor | QuantizedKV,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    softmax_scale: float,
    tree_mask: torch.Tensor | None,
) -> torch.Tensor:
    """As `decode_attention`, in float32 or better."""
    if not q.numel():
        return torch.zeros_like(q)
    batch, heads, q_len, head_dim = q.shape
    wide, kv_heads = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    grouped = q.to(wide).reshape(batch, kv_heads, -1, head_dim) * softmax_scale
    lengths = cache_seqlens.to(torch.int64)
    rows, state = _Rows(lengths, q_len, heads // kv_heads, tree_mask), _Softmax(grouped)
    recent = isinstance(k, QuantizedKV) and k.recent is not None
    counts = torch.minimum(k.n_quantized.to(torch.int64), lengths) if recent else lengths
    if k.shape[0] and k.shape[2]:
        _add_codes(state, grouped, k, v, block_table, counts, rows)
    if recent:
        _add_recent(state, grouped, k, v, counts, rows)
    return state.result().to(q.dtype).view(q.shape)


def library(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, softmax_scale: float) -> torch.Tensor:
    """Rows of one length in contiguous tensors: PyTorch's kernel. The query heads of a KV head become its queries,
    so that one query a head is still a matrix product."""
    batch, heads, q_len, head_dim = q.shape
    kv_heads = k.shape[1]
    mask = None
    if q_len > 1:
        place = torch.arange(q_len, device=q.device)[:, None] + length - q_len
        mask = (torch.arange(length, device=q.device) <= place).repeat(heads // kv_heads, 1)
    grouped = q.reshape(batch, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, k[:, :, :length], v[:, :, :length], mask, scale=softmax_scale)
    return out.reshape(q.shape)
