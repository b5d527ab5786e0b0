"""What is compiled ahead of time of this room's kernels."""

from collections.abc import Iterator

from labkit.kernels.aot import Case
from labkit.kernels.chips import SHARED_BYTES
from labkit.kernels.flash_attention import launch
from labkit.kernels.flash_attention.aot_backward import backward_cases
from labkit.kernels.flash_attention.blocks import TABLE, Blocks, blocks_for, chip_class
from labkit.kernels.flash_attention.triton import _forward_kernel

# Bytes a thread that may spill, by chip's class, form, head and what is padded, as measured; 0 for all others.
# On sm_90 that is in the tiles at an edge, of which a block of queries has one to three.
_SPILLED = {(90, True, head, padding): n for head in (80, 128) for padding, n in (("", 128), ("bounds", 208))}
_SPILLED |= {(100, False, 64, ""): 16}
_SPILLED |= {(100, False, 64, "bounds"): 8, (100, True, 80, "bounds"): 8, (100, True, 128, "bounds"): 8}
_NUMBERS = ("heads", "all_heads", "together", "q_len", "kv_len", "mask_stride_b")


def _types(fixed: dict, blocks: Blocks, dtype: str) -> dict[str, str]:
    """The types of the kernel's arguments by name."""
    names = [name for name in _forward_kernel.arg_names if name not in fixed]
    types = {name: "i32" if "_stride_" in name or name in _NUMBERS else f"*{dtype}" for name in names}
    if blocks.described:
        for name, rows in (("q", blocks.block_q), ("k", blocks.block_k), ("v", blocks.block_k)):
            types[name] = f"tensordesc<{dtype}[1, 1, {rows}, {fixed['padded']}]>"
    return types | {"lse_ptr": "*fp32", "bounds_ptr": "*i32", "mask_ptr": "*i1", "scale_log2": "fp32"}


def _case(
    kind: int,
    head_dim: int,
    *,
    described: bool,
    causal: bool = True,
    padding: str = "",
    heads_each: int = 4,
    dtype: str = "bf16",
    capabilities: tuple[int, ...] | None = None,
    every_run: bool = False,
) -> Case:
    """The kernel with the tile that chips of a class take. `padding`: none, "bounds", or "holes" between them."""
    blocks = blocks_for(head_dim, kind, described)
    fixed = launch.constants(head_dim, heads_each, causal, padding != "", padding == "holes", blocks)
    types = _types(fixed, blocks, dtype)
    how = f"{'causal' if causal else 'full'}{', ' * bool(padding)}{padding}{', described' if described else ''}"
    alike = tuple(chip for chip in SHARED_BYTES if chip_class(chip) == kind)
    return Case(
        f"flash_attention {dtype} {head_dim}, {how}, sm_{kind}'s",
        _forward_kernel,
        types,
        fixed,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        max_registers=blocks.max_registers,
        divisible=tuple(name for name in types if "_stride_" in name and name not in _NUMBERS),
        spill_bytes=_SPILLED.get((kind, described, head_dim, padding), 0),
        capabilities=alike if capabilities is None else capabilities,
        every_run=every_run,
    )


def _forward_cases() -> Iterator[Case]:
    """In every run: heads of 128 with a causal mask on each chip, and by descriptors where there are any; two of 64."""
    for kind, rows in TABLE.items():
        yield _case(kind, 128, described=False, every_run=True)
        if any(row.described for row in rows):
            yield _case(kind, 128, described=True, every_run=True)
    yield _case(80, 64, described=False, capabilities=(80,), every_run=True)
    yield _case(90, 64, described=True, capabilities=(90,), every_run=True)
    for kind, rows in TABLE.items():
        for described in sorted({row.described for row in rows}):
            for head_dim in (32, 64, 80, 128, 256):
                yield _case(kind, head_dim, described=described, causal=False, heads_each=1)
                yield _case(kind, head_dim, described=described, padding="bounds")
                if not described:
                    yield _case(kind, head_dim, described=described, padding="holes")
            yield _case(kind, 128, described=described, dtype="fp16")


def aot_cases() -> Iterator[Case]:
    """The forward pass and the backward pass."""
    yield from _forward_cases()
    yield from backward_cases()
