"""What is compiled ahead of time of this room's kernels."""

import math
from collections.abc import Iterator
from dataclasses import replace

from labkit.kernels.aot import Case
from labkit.kernels.chips import SHARED_BYTES
from labkit.kernels.quantized_linear import triton as room
from labkit.kernels.quantized_linear.interleaved import WORDS, block_columns

_TYPES = {
    "x_ptr": "*bf16",
    "words_ptr": "*i32",
    "pairs_ptr": "*i32",
    "order_ptr": "*i32",
    "y_ptr": "*bf16",
    "parts_ptr": "*fp32",
    "tickets_ptr": "*i32",
    "out_ptr": "*bf16",
    **dict.fromkeys(("rows", "out_features", "in_features", "group_size", "x_stride", "split_k"), "i32"),
}
_SIZES = ("out_features", "in_features", "group_size", "x_stride")
# The default group, which every run compiles; the rest is in `make aot`. Of 96 columns a group, blocks share scales
# unevenly, and of 77 there is one group a row and no size is a multiple of 16.
_GROUP, _OTHERS = 64, (16, 32, 96, 77, 128)
# Chips that a case of every run is compiled for then, by bits and by index of the tile, or for dequantizing; the others
# follow in `make aot`. All six where it is the tile that decodes.
_CHIPS = {
    (4, 0): tuple(SHARED_BYTES),
    (8, 0): (80, 90, 100, 120),
    (4, 1): (90, 120),
    (4, 2): (80, 90, 100),
    (4, 3): (80, 90, 100, 120),
    (8, 3): (80, 100, 120),
    "dequantize": (80, 100),
}
# Bytes a thread that the rarer cases may spill: five of them do, on sm_120 alone.
_RARELY_SPILLED = 16


def _case(name: str, kernel: object, constants: dict, group: int, half: bool, **options: object) -> Case:
    types = {**_TYPES, "x_ptr": "*fp16", "y_ptr": "*fp16", "out_ptr": "*fp16"} if half else dict(_TYPES)
    if not constants.get("split", True):
        types["parts_ptr"] = types["y_ptr"]  # what a launch gives where there are no parts
    signature = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    name += ", float16" if half else ""
    divisible = _SIZES if group % 16 == 0 else ()
    return Case(name, kernel, signature, constants, divisible=divisible, **options)


def _span(group: int, bits: int) -> int:
    columns = block_columns(bits)
    return (columns if group == 77 else math.gcd(group, columns)) // WORDS


def _product(tile: room.Tile, bits: int, group: int, *, has_order: bool, half: bool) -> Case:
    name = f"W{bits}A16 g{group}{' act-order' if has_order else ''}, {tile.block_n} x {tile.block_m}"
    constants = {
        "bits": bits,
        "span": _span(group, bits),
        "has_order": has_order,
        "split": tile.programs > 0,
        "block_n": tile.block_n,
        "block_m": tile.block_m,
    }
    often = bits == 4 or tile in (room.TILES[0], room.TILES[-1])
    every_run = often and group == _GROUP and not has_order and not half
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "every_run": every_run}
    options["spill_bytes"] = 0 if every_run else _RARELY_SPILLED
    kernel = room._quantized_linear_kernel
    return _case(name + (" split-K" if tile.programs else ""), kernel, constants, group, half, **options)


def _shared_out(case: Case, key: object) -> Iterator[Case]:
    """A case of every run as two: for the chips that are compiled for then, and for the others."""
    if not case.every_run:
        yield case
        return
    chips = _CHIPS[key]
    yield replace(case, capabilities=chips)
    if others := tuple(chip for chip in SHARED_BYTES if chip not in chips):
        yield replace(case, capabilities=others, every_run=False)


def aot_cases() -> Iterator[Case]:
    """In every run: each tile at 4 bits, the first and the last at 8, and dequantizing, in bfloat16."""
    for index, tile in enumerate(room.TILES):
        for bits in (4, 8):
            for group in (_GROUP, *_OTHERS):
                # Only few rows are gathered in the kernel.
                for has_order in (False, True) if tile.rows <= room.GATHER_ROWS else (False,):
                    for half in (False, True) if group == _GROUP else (False,):
                        case = _product(tile, bits, group, has_order=has_order, half=half)
                        yield from _shared_out(case, (bits, index))
    for bits in (4, 8):
        for has_order in (False, True):
            constants = {"bits": bits, "span": _span(_GROUP, bits), "has_order": has_order}
            constants["block_n"] = room.DEQUANTIZE_BLOCK_N
            for half in (False, True):
                name = f"dequantize W{bits} g{_GROUP}{' act-order' if has_order else ''}"
                every_run = bits == 4 and not has_order and not half
                case = _case(name, room._dequantize_kernel, constants, _GROUP, half, every_run=every_run)
                yield from _shared_out(case, "dequantize")
