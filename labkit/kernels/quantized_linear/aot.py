"""What is compiled ahead of time of this room's kernels."""

from collections.abc import Iterator

from labkit.kernels.aot import Case
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
_DIVISIBLE = ("out_features", "in_features", "group_size", "x_stride")


def _case(name: str, kernel: object, constants: dict, *, half: bool = False, **options: object) -> Case:
    types = {**_TYPES, "x_ptr": "*fp16", "y_ptr": "*fp16", "out_ptr": "*fp16"} if half else _TYPES
    signature = {argument: types[argument] for argument in kernel.arg_names if argument not in constants}
    name += ", float16" if half else ""
    return Case(name, kernel, signature, constants, divisible=_DIVISIBLE, **options)


def _product(tile: room.Tile, bits: int, group: int, *, has_order: bool, half: bool, every_run: bool) -> Case:
    name = f"W{bits}A16 g{group}{' act-order' if has_order else ''}, {tile.block_n} x {tile.block_m}"
    constants = {
        "bits": bits,
        "span": min(group, block_columns(bits)) // WORDS,
        "has_order": has_order,
        "split": tile.programs > 0,
        "block_n": tile.block_n,
        "block_m": tile.block_m,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "every_run": every_run, "half": half}
    kernel = room._quantized_linear_kernel
    return _case(name + (" split-K" if tile.programs else ""), kernel, constants, **options)


def aot_cases() -> Iterator[Case]:
    """In every run: each tile at 4 bits, and the first and the last at 8, with groups of 128 in bfloat16."""
    for tile in room.TILES:
        for bits in (4, 8):
            often = bits == 4 or tile in (room.TILES[0], room.TILES[-1])
            for group, has_order in ((128, False), (32, True)):
                for half in (False, True):
                    every_run = often and not has_order and not half
                    yield _product(tile, bits, group, has_order=has_order, half=half, every_run=every_run)
    for bits in (4, 8):
        constants = {"bits": bits, "span": block_columns(bits) // WORDS, "has_order": False}
        constants["block_n"] = room.DEQUANTIZE_BLOCK_N
        yield _case(f"dequantize W{bits} g128", room._dequantize_kernel, constants, every_run=bits == 4)
