"""What launches the Triton kernels: which tile, how many splits, and the pointers. Nothing here waits for a GPU."""

from functools import cache

import torch

from labkit.kernels.decode_attention.combine import COMBINED_AT_ONCE, _combine_kernel
from labkit.kernels.decode_attention.triton import (
    DTYPES,
    LARGEST_HEAD,
    LEAST_ROWS,
    LEAST_TOKENS,
    LOG2_E,
    MOST_ROWS,
    MOST_SPLITS,
    TILES,
    Tile,
    _decode_attention_kernel,
)
from labkit.kernels.kv_types import QuantizedKV, in_words

KV = torch.Tensor | QuantizedKV
COMBINE_WARPS = 2


def why_not(q: torch.Tensor, k: KV, v: KV) -> str | None:
    """Why the kernel cannot read these, or None."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v) if isinstance(t, torch.Tensor)):
        return "it has no backward pass, and q, k or v requires a gradient"
    if q.dtype not in DTYPES or (q.device.type == "cpu" and q.dtype is not torch.float16):
        takes = "bfloat16 and float16" if q.device.type != "cpu" else "float16 alone in Triton's interpreter"
        return f"it takes {takes}, and q is {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > LARGEST_HEAD:
        return f"it takes heads of up to {LARGEST_HEAD}, and these have {q.shape[3]}"
    if isinstance(k, QuantizedKV):
        return _why_not_codes(k, v)
    if k.stride(3) != 1 or v.stride(3) != 1:
        return "the channels of k and v have to lie side by side"
    return None


def _why_not_codes(k: QuantizedKV, v: QuantizedKV) -> str | None:
    if (k.axis, v.axis) != ("channel", "token"):
        return f"it reads keys by channel and values by token; here they are by {k.axis} and by {v.axis}"
    if k.group_size % LEAST_ROWS:
        return f"it reads keys in groups of a multiple of {LEAST_ROWS} tokens; these have {k.group_size}"
    for x in (k, v):
        if not in_words(x.codes):
            return "the codes of a token have to start at an even byte"
        together = all(t.stride(3) == 1 or t.shape[3] == 1 for t in x.tensors.values() if t.ndim == 4)
        if not together or x.scales.stride() != x.minimums.stride():
            return "channels have to lie side by side, and scales and minimums alike"
    return None


def next_power(n: int, least: int) -> int:
    return max(least, 1 << max(0, n - 1).bit_length())


def _bits(x: KV) -> int:
    return x.bits if isinstance(x, QuantizedKV) else 16


def tile_for(bits: int, head_dim: int) -> Tile:
    """The row of the table for keys and values of up to so many bits an element."""
    return next(tile for tile in TILES if bits <= tile.bits and head_dim <= tile.head_dim)


def warps_for(tile: Tile, block_m: int) -> int:
    """More for more rows: what one warp holds of the query and the output of the fewest fills its registers."""
    return min(8, tile.num_warps * (block_m // LEAST_ROWS) ** 2)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def splits_for(tile: Tile, programs: int, capacity: int, device: torch.device) -> int:
    """How many programs share a row's tokens, where there are `programs` without. From shapes alone: how long rows are
    stands on the GPU."""
    wanted = tile.programs * _multiprocessors(device) // max(1, programs)
    return max(1, min(wanted, capacity // LEAST_TOKENS, MOST_SPLITS))


def _paged(table: torch.Tensor | None, block_size: int, block_t: int) -> int:
    return 0 if table is None else 1 if block_size % block_t == 0 else 2


def _pointers(x: KV) -> tuple[torch.Tensor, ...]:
    """Elements or codes, scales, minimums, recent: something of the right type where there is none."""
    if not isinstance(x, QuantizedKV):
        return x, x, x, x
    return x.codes.view(torch.int16), x.scales, x.minimums, x.scales if x.recent is None else x.recent


def attend(
    q: torch.Tensor,
    k: KV,
    v: KV,
    lengths: torch.Tensor,
    table: torch.Tensor | None,
    softmax_scale: float,
    tree_mask: torch.Tensor | None,
    *,
    splits: int | None = None,
) -> torch.Tensor:
    """As `decode_attention`. `splits` overrides how many programs share a row's tokens."""
    assert why_not(q, k, v) is None, why_not(q, k, v)
    batch, heads, q_len, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    q = q if q.stride(3) == 1 else q.contiguous()
    quantized = isinstance(k, QuantizedKV)
    tile = tile_for(max(_bits(k), _bits(v)), head_dim)
    block_t = tile.block_t if not quantized or k.group_size % tile.block_t == 0 else LEAST_ROWS
    kv_heads, rows = k.shape[1], heads // k.shape[1] * q_len
    block_m = min(MOST_ROWS, next_power(rows, LEAST_ROWS))
    grid_m = -(-rows // block_m)
    capacity = k.shape[2] * (1 if table is None else table.shape[1])
    splits = splits or splits_for(tile, batch * kv_heads * grid_m, capacity, q.device)
    parts, sums = out, lengths
    if splits > 1:
        parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(splits, *q.shape[:3], dtype=torch.float32, device=q.device)
    constants = _constants(q, k, v, table, tree_mask, splits > 1, block_m, block_t)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(q):
        pointers = (q, k, v, lengths, table, tree_mask, parts, sums)
        _launch((batch * kv_heads, splits, grid_m), tile, pointers, softmax_scale, constants)
        if splits > 1:
            _combine(parts, sums, out)
    return out


def _combine(parts: torch.Tensor, sums: torch.Tensor, out: torch.Tensor) -> None:
    """The splits' results to the one that all tokens together give."""
    splits, head_dim = parts.shape[0], parts.shape[-1]
    rows = sums[0].numel()
    _combine_kernel[(rows,)](
        parts,
        sums,
        out,
        rows,
        splits,
        head_dim=head_dim,
        head_dim_p=next_power(head_dim, LEAST_ROWS),
        splits_p=next_power(splits, 2),
        at_once=COMBINED_AT_ONCE,
        num_warps=COMBINE_WARPS,
    )


def _constants(
    q: torch.Tensor,
    k: KV,
    v: KV,
    table: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    split: bool,
    block_m: int,
    block_t: int,
) -> dict[str, object]:
    """The kernel's constants by name."""
    found = {
        "heads_each": q.shape[1] // k.shape[1],
        "paged": _paged(table, k.shape[2], block_t),
        "has_recent": isinstance(k, QuantizedKV) and k.recent is not None,
        "causal": q.shape[2] > 1,
        "has_tree": tree_mask is not None,
        "split": split,
        "block_m": block_m,
        "block_t": block_t,
    }
    return found | part_constants("k", k) | part_constants("v", v)


def part_constants(name: str, x: KV) -> dict[str, int]:
    """What the kernel has to know of keys or of values."""
    bits = _bits(x)
    fields = 1 if bits == 16 else 16 // bits
    part = x.shape[3] // fields
    group = x.group_size if isinstance(x, QuantizedKV) else 1
    named = {"bits": bits, "group": group, "fields": fields, "part": part, "part_p": next_power(part, LEAST_ROWS)}
    return {f"{name}_{key}": value for key, value in named.items()}


def _launch(
    grid: tuple[int, int, int], tile: Tile, pointers: tuple, softmax_scale: float, constants: dict[str, object]
) -> None:
    """The kernel over q, k, v, lengths, table, tree_mask, parts and sums; a table or mask may be missing."""
    q, k, v, lengths, table, tree_mask, parts, sums = pointers
    (k0, k_scales, k_minimums, k_recent), (v0, v_scales, v_minimums, v_recent) = _pointers(k), _pointers(v)
    _decode_attention_kernel[grid](
        q,
        k0,
        v0,
        k_scales,
        k_minimums,
        v_scales,
        v_minimums,
        k_recent,
        v_recent,
        lengths,
        k.n_quantized if constants["has_recent"] else lengths,
        lengths if table is None else table,
        lengths if tree_mask is None else tree_mask,
        parts,
        sums,
        softmax_scale * LOG2_E,
        k.shape[1],
        q.shape[2],
        k.shape[2],
        grid[1],
        0 if table is None else table.stride(0),
        *q.stride()[:3],
        *k0.stride()[:3],
        *v0.stride()[:3],
        *k_scales.stride()[:3],
        *v_scales.stride()[:3],
        *k_recent.stride()[:3],
        *v_recent.stride()[:3],
        **constants,
        num_warps=warps_for(tile, constants["block_m"]),
        num_stages=tile.num_stages,
    )
