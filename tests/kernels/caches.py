"""Random caches for tests of attention: dense or in codes, contiguous or in blocks, with NaN where nobody may look."""

import dataclasses
from dataclasses import dataclass

import torch

from labkit.kernels import QuantizedKV, decode_attention, kv_quantize

NAN = float("nan")


@dataclass(frozen=True)
class Cache:
    """What `decode_attention` takes; `dense` holds the keys and values that it stands for, float64 `(batch, kv_heads,
    length, head_dim)`, put together without the code under test, and `low` the same worked out in q's dtype."""

    q: torch.Tensor
    k: torch.Tensor | QuantizedKV
    v: torch.Tensor | QuantizedKV
    lengths: torch.Tensor
    table: torch.Tensor | None
    dense: tuple[torch.Tensor, torch.Tensor]
    low: tuple[torch.Tensor, torch.Tensor]

    def attend(self, **options: object) -> torch.Tensor:
        return decode_attention(self.q, self.k, self.v, self.lengths, block_table=self.table, **options)


def to_blocks(x: torch.Tensor, columns: int, order: torch.Tensor) -> torch.Tensor:
    """`(batch, heads, length, width)` as blocks, `order[i]` the place of block i; two more blocks that nobody owns."""
    cut = x.unflatten(2, (columns, -1)).transpose(1, 2).flatten(0, 1)
    filling = 255 if x.dtype == torch.uint8 else NAN
    blocks = torch.full((cut.shape[0] + 2, *cut.shape[1:]), filling, dtype=x.dtype, device=x.device)
    blocks[order] = cut
    return blocks


def make(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    q_len: int = 1,
    bits: int = 16,
    v_bits: int | None = None,
    group: int = 16,
    v_group: int | None = None,
    recent: int = 0,
    block_size: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Cache:
    """A cache for rows of `lengths` tokens, of which each holds up to `recent` in full precision."""
    batch, unit = len(lengths), max(group if bits < 16 else 1, block_size, 1)
    room = -(-max(*lengths, 1, 1) // unit) * unit
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(batch, heads, q_len, head_dim, device=device, dtype=dtype)
    whole = [torch.randn(batch, kv_heads, room, head_dim, device=device).to(dtype) for _ in range(2)]
    counts = seqlens - torch.minimum(seqlens, torch.arange(batch, device=device) % 3 + recent).int() * (recent > 0)
    held, dense, low = [], [], []
    for x, axis, size, n_bits in zip(
        whole, ("channel", "token"), (group, v_group or min(group, head_dim)), (bits, v_bits or bits), strict=True
    ):
        if bits == 16:
            dense.append(x.double())
            low.append(x.clone())
            held.append(x)
            continue
        codes = kv_quantize(x, bits=n_bits, group_size=size, axis=axis, backend="reference")
        dense.append(codes.dequantize(torch.float64))
        low.append(codes.dequantize(dtype))
        held.append(_with_recent(codes, (dense[-1], low[-1]), x, counts, seqlens, recent) if recent else codes)
    held, table = _laid_out(held, seqlens if bits == 16 else counts, block_size, room, device)
    return Cache(q, *held, seqlens, table, tuple(dense), tuple(low))


def _with_recent(codes, meant, x, counts, lengths, recent):
    """The tokens past `counts` in full precision, with NaN in the rest of their room."""
    late = torch.full((x.shape[0], x.shape[1], recent + 5, x.shape[3]), NAN, dtype=x.dtype, device=x.device)
    for row, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
        late[row, :, : length - count] = x[row, :, count:length]
        for whole in meant:
            whole[row, :, count:length] = x[row, :, count:length].to(whole.dtype)
    return dataclasses.replace(codes, recent=late, n_quantized=counts)


def _laid_out(held, counts, block_size, room, device):
    """In blocks, or not. What no row owns is NaN, in the scales where there are codes; such blocks have no id."""
    if not block_size:
        for x in held:
            for row, count in enumerate(counts.tolist()):
                if isinstance(x, torch.Tensor):
                    x[row, :, count:] = NAN
                else:
                    first = -(-count // x.group_size) if x.axis == "channel" else count
                    x.scales[row, :, first:] = x.minimums[row, :, first:] = NAN
        return held, None
    columns, batch = room // block_size, counts.shape[0]
    order = torch.randperm(batch * columns + 2, device=device)[: batch * columns]
    table = order.view(batch, columns).int()
    names = ("codes", "scales", "minimums")
    laid = []
    for x in held:
        if isinstance(x, torch.Tensor):
            laid.append(to_blocks(x, columns, order))
        else:
            laid.append(dataclasses.replace(x, **{name: to_blocks(getattr(x, name), columns, order) for name in names}))
    for row, count in enumerate(counts.tolist()):
        for column in range(-(-count // block_size), columns):
            for x in laid:
                for tensor in (x,) if isinstance(x, torch.Tensor) else (x.scales, x.minimums):
                    tensor[table[row, column]] = NAN
            table[row, column] = -1
    return laid, table


def exact(cache: Cache, tree_mask: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
    """What comes out in float64, query by query, straight from the definition."""
    q, (keys, values) = cache.q.double(), cache.dense
    out, each = torch.zeros_like(q), q.shape[1] // keys.shape[1]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    for b, length in enumerate(cache.lengths.tolist()):
        before = length - q.shape[2]
        for i in range(q.shape[2]):
            new = [j for j in range(q.shape[2]) if (j <= i if tree_mask is None else tree_mask[i, j])]
            seen = [*range(max(0, before)), *(before + j for j in new if before + j >= 0)]
            for h in range(q.shape[1] if seen else 0):
                scores = keys[b, h // each, seen] @ q[b, h, i] * scale
                out[b, h, i] = scores.softmax(0) @ values[b, h // each, seen]
    return out


def plain(cache: Cache, tree_mask: torch.Tensor | None = None) -> torch.Tensor:
    """The formula in q's own precision by PyTorch: scores, softmax and weighted sum are rounded to it."""
    q, each = cache.q, cache.q.shape[1] // cache.dense[0].shape[1]
    keys, values = (x.repeat_interleave(each, dim=1) for x in cache.low)
    place = torch.arange(q.shape[2], device=q.device)[None, :, None]
    new = torch.arange(keys.shape[2], device=q.device) - (cache.lengths[:, None, None] - q.shape[2])
    sees = new <= place
    if tree_mask is not None:
        at = new[:, 0].clamp(0, q.shape[2] - 1)
        sees = (new < 0) | (tree_mask[:, at].transpose(0, 1) & (new < q.shape[2]))
    scores = (q @ keys.transpose(2, 3)) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~sees[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ values


def random_tree(q_len: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Each token hangs from an earlier one or from the last of the old ones."""
    tree = torch.eye(q_len, dtype=torch.bool)
    for i in range(1, q_len):
        parent = int(torch.randint(-1, i, ()))
        if parent >= 0:
            tree[i] |= tree[parent]
    return tree.to(device)
