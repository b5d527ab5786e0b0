"""What is compiled ahead of time of this room's kernels."""

from collections.abc import Iterator

from labkit.kernels.aot import Case
from labkit.kernels.kv_quantize import triton as room


def _case(axis: str, bits: int, group: int, head_dim: int, **options: object) -> Case:
    kernel = room._kv_quantize_channel_kernel if axis == "channel" else room._kv_quantize_token_kernel
    part = head_dim * bits // 16
    constants = {"bits": bits, "group": group, "part": part}
    if axis == "channel":
        constants |= {"group_p": room.next_power(group), "part_p": room.next_power(part)}
    else:
        constants["block_t"] = room.TILE.block_t
    types = {"x_ptr": "*bf16", "codes_ptr": "*i16", "scales_ptr": "*bf16", "minimums_ptr": "*bf16"}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    divisible = ("x_stride_n", "x_stride_h", "x_stride_t")
    name = f"kv_quantize int{bits} g{group} by {axis}, heads of {head_dim}"
    return Case(name, kernel, signature, constants, num_warps=room.TILE.num_warps, divisible=divisible, **options)


def aot_cases() -> Iterator[Case]:
    """In every run: 4 bits by channel and by token on Hopper; the rest in `make aot`."""
    for axis in ("channel", "token"):
        yield _case(axis, 4, 32, 128, every_run=True, capabilities=(90,))
        for bits in (8, 4, 2):
            for group, head_dim in ((32, 64), (64, 128), (64, 256)):
                yield _case(axis, bits, group, head_dim, every_run=False)
    yield _case("channel", 4, 24, 80, every_run=False)
