"""What is compiled ahead of time of this room's kernels."""

from collections.abc import Iterator

import torch

from labkit.kernels.aot import Case
from labkit.kernels.chips import SHARED_BYTES
from labkit.kernels.decode_attention import combine, launch
from labkit.kernels.decode_attention import triton as room
from labkit.kernels.kv_types import QuantizedKV

_STRIDES = tuple(
    f"{name}_stride_{of}"
    for name in ("q", "k", "v", "kg", "vg", "kr", "vr")
    for of in ("nht" if name != "q" else "bhi")
)
_SIZES = ("kv_heads", "q_len", "block_size", "splits", "table_stride", *_STRIDES)
# Values' scales lie head_dim / group apart, which is no multiple of 16.
_UNEVEN = ("kv_heads", "q_len", "block_size", "splits", "table_stride", "vg_stride_t", "vg_stride_h")

# Bytes a thread that rare cases may spill, by bits, rows and size of head, as measured, and for all others what sm_120
# takes on its stack; those of every run spill nothing. Two bits are eight fields, and the query and the output as many
# tiles; heads of 80 leave parts of 10 or 20, which take the room of 16 or 32.
_SPILLED = {(2, 16, 80): 64, (2, 32, 80): 192, (2, 32, 256): 640, (4, 32, 80): 256, (4, 32, 128): 64, (8, 16, 80): 64}
_SPILLED |= {(8, 16, 128): 64, (2, 32, 64): 32}
_STACK = 16


def _keys(bits: int, head_dim: int, group: int, axis: str) -> torch.Tensor | QuantizedKV:
    """Something of the right form, without memory."""
    if bits == 16:
        return torch.empty(1, 1, 0, head_dim, dtype=torch.bfloat16)
    codes = torch.empty(1, 1, 0, head_dim * bits // 8, dtype=torch.uint8)
    grid = torch.empty((1, 1, 0, head_dim if axis == "channel" else head_dim // group), dtype=torch.bfloat16)
    return QuantizedKV(codes, grid, grid, None, None, bits, group, axis)


def _case(
    bits: int,
    head_dim: int,
    *,
    group: int = 32,
    paged: int = 1,
    causal: bool = False,
    has_tree: bool = False,
    rows: int = 16,
    capabilities: tuple[int, ...] = tuple(SHARED_BYTES),
    every_run: bool = False,
) -> Case:
    tile = launch.tile_for(bits, head_dim)
    k, v = _keys(bits, head_dim, group, "channel"), _keys(bits, head_dim, min(group, head_dim), "token")
    constants = {
        "heads_each": 4,
        "paged": paged,
        "has_recent": bits < 16,
        "causal": causal,
        "has_tree": has_tree,
        "split": True,
        "block_m": rows,
        "block_t": tile.block_t if bits == 16 or group % tile.block_t == 0 else room.LEAST_ROWS,
        **launch.part_constants("k", k),
        **launch.part_constants("v", v),
    }
    types = {name: "*bf16" for name in room._decode_attention_kernel.arg_names if name.endswith("_ptr")}
    types |= dict.fromkeys(("k_ptr", "v_ptr"), "*bf16" if bits == 16 else "*i16")
    types |= dict.fromkeys(("lengths_ptr", "counts_ptr", "table_ptr"), "*i32")
    types |= dict.fromkeys(("out_ptr", "sums_ptr"), "*fp32")
    types |= dict.fromkeys(_SIZES, "i32") | {"tree_ptr": "*i1", "scale_log2": "fp32"}
    signature = {name: types[name] for name in room._decode_attention_kernel.arg_names if name not in constants}
    divisible = tuple(name for name in _STRIDES if name not in _UNEVEN)
    how = ("contiguous", "blocks", "small blocks")[paged] + (", tree" if has_tree else ", causal" if causal else "")
    group_of = "" if bits == 16 else f" g{group}"
    name = f"decode_attention {'bf16' if bits == 16 else f'int{bits}'}{group_of} {rows} x {head_dim}, {how}"
    options = {"num_warps": launch.warps_for(tile, rows), "num_stages": tile.num_stages, "divisible": divisible}
    options |= {
        "capabilities": capabilities,
        "every_run": every_run,
        "spill_bytes": 0 if every_run else _SPILLED.get((bits, rows, head_dim), _STACK),
    }
    return Case(name, room._decode_attention_kernel, signature, constants, **options)


def _combining(head_dim: int, splits: int, **options: object) -> Case:
    constants = {"head_dim": head_dim, "head_dim_p": launch.next_power(head_dim, room.LEAST_ROWS)}
    constants |= {"splits_p": splits, "at_once": combine.COMBINED_AT_ONCE}
    signature = {"parts_ptr": "*fp32", "sums_ptr": "*fp32", "out_ptr": "*bf16", "rows": "i32", "splits": "i32"}
    name = f"decode_attention combines {splits} splits of {head_dim}"
    return Case(name, combine._combine_kernel, signature, constants, num_warps=launch.COMBINE_WARPS, **options)


def aot_cases() -> Iterator[Case]:
    """In every run: 16 bits and 4 on each chip, 8 and 2 where they are most likely to run; all else in `make aot`."""
    yield _case(16, 128, every_run=True)
    yield _case(4, 128, every_run=True)
    yield _case(8, 128, every_run=True, capabilities=(80, 90))
    yield _case(2, 128, every_run=True, capabilities=(90,))
    yield _combining(128, 16, every_run=True, capabilities=(90,))
    yield _combining(256, room.MOST_SPLITS, every_run=False)
    for bits in (16, 8, 4, 2):
        for head_dim in (64, 80, 128, 256):
            group = 16 if head_dim == 80 else 32
            for paged in (0, 1, 2) if bits == 16 else (0, 1):
                yield _case(bits, head_dim, group=group, paged=paged, causal=True, rows=room.MOST_ROWS)
            yield _case(bits, head_dim, group=group, causal=True, has_tree=True, rows=room.MOST_ROWS)
            if bits < 16:
                yield _case(bits, head_dim, group=16, paged=0)
                yield _case(bits, head_dim, group=head_dim if head_dim == 80 else 128, paged=0)
