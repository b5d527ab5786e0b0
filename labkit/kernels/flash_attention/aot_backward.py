"""What is compiled ahead of time of the backward kernels; the room's `aot.py` takes it along."""

from collections.abc import Iterator

from labkit._compat import triton_spills_more
from labkit.kernels.aot import Case
from labkit.kernels.chips import SHARED_BYTES
from labkit.kernels.flash_attention import backward as room
from labkit.kernels.flash_attention.backward_kernels import _delta_kernel, _dk_dv_kernel, _dq_kernel
from labkit.kernels.flash_attention.blocks import BACKWARD, backward_blocks_for, chip_class, padded_head

_NUMBERS = {"softmax_scale": "fp32", "scale_log2": "fp32", "kv_heads": "i32", "q_len": "i32", "kv_len": "i32"}
_POINTERS = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "bounds_ptr": "*i32", "mask_ptr": "*i1"}

# Bytes a thread that may spill, as measured, by kernel, chips' kind, descriptors or not, and head; 0 for all others. On
# sm_100 that is outside of the inner loops, where gradients go from tensor memory to registers and back.
_SPILLED = {
    ("dK, dV", 90, True, 256): 184,
    ("dK, dV", 90, False, 256): 24,
    ("dK, dV", 100, True, 80): 376,
    ("dK, dV", 100, True, 128): 376,
    ("dK, dV", 100, True, 256): 592,
    ("dK, dV", 100, False, 256): 136,
    ("dQ", 100, True, 64): 8,
    ("dQ", 100, True, 80): 8,
    ("dQ", 100, True, 128): 16,
    ("dK, dV", 80, False, 128): 8,
    ("dK, dV", 80, False, 256): 32,
    ("dK, dV", 86, False, 80): 8,
    ("dQ", 86, False, 80): 40,
    ("dQ", 86, False, 128): 40,
}
if triton_spills_more():  # between the loops
    _SPILLED |= {("dK, dV", 90, True, head): 256 for head in (80, 128)}
    _SPILLED |= {("dK, dV", 90, False, 64): 120, ("dK, dV", 90, False, 80): 272, ("dK, dV", 90, False, 128): 256}


def _types(kernel: object, fixed: dict[str, object], rows: tuple[int, int]) -> dict[str, str]:
    """The types of a kernel's arguments by name. `rows`: of a tile of queries and of keys."""
    names = [name for name in kernel.arg_names if name not in fixed]
    types = {name: "i32" if "_stride_" in name else "*bf16" for name in names} | _NUMBERS | _POINTERS
    if fixed["described"]:
        for name, n in (("q", rows[0]), ("k", rows[1]), ("v", rows[1]), ("dout", rows[0])):
            types[name] = f"tensordesc<bf16[1, 1, {n}, {fixed['head_dim_p']}]>"
    return {name: types[name] for name in names}


def _case(
    kernel: object,
    kind: int,
    head_dim: int,
    *,
    described: bool,
    causal: bool = True,
    padding: bool = False,
    heads_each: int = 4,
    capabilities: tuple[int, ...] | None = None,
    every_run: bool = False,
) -> Case:
    """A kernel with the tile that chips of a kind take."""
    of = "dQ" if kernel is _dq_kernel else "dK, dV"
    tile = backward_blocks_for(head_dim, kind, described)[kernel is _dq_kernel]
    fixed = room.constants(head_dim, heads_each, causal, padding, padding, described)
    fixed |= {"block_q": tile.block_q, "block_k": tile.block_k}
    types = _types(kernel, fixed, (tile.block_q, tile.block_k))
    how = f"{'causal' if causal else 'full'}{', padding' if padding else ''}{', described' if described else ''}"
    alike = tuple(c for c in SHARED_BYTES if chip_class(c) == kind)
    return Case(
        f"flash_attention {of} bf16 {head_dim}, {how}, sm_{kind}'s",
        kernel,
        types,
        fixed,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        divisible=tuple(name for name in types if "_stride_" in name),
        spill_bytes=_SPILLED.get((of, kind, described, head_dim), 0),
        capabilities=alike if capabilities is None else capabilities,
        every_run=every_run,
    )


def _delta(head_dim: int) -> Case:
    fixed = {"head_dim": head_dim, "head_dim_p": padded_head(head_dim), "rows": room.DELTA_ROWS}
    names = [name for name in _delta_kernel.arg_names if name not in fixed]
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names} | {"delta_ptr": "*fp32"}
    options = {"divisible": tuple(name for name in types if "_stride_" in name), "every_run": False}
    options["spill_bytes"] = 16 if head_dim == 80 else 0
    name = f"flash_attention rowsum(dO * O) bf16 {head_dim}"
    return Case(name, _delta_kernel, types, fixed, num_warps=room.DELTA_WARPS, **options)


# What every run compiles, heads of 128 with a causal mask: on which chips of a kind, for dK and dV, and for dQ.
_EVERY_RUN = {
    (90, True): ((90,), (90,)),
    (100, True): ((100,), ()),
    (80, False): ((80,), (80,)),
    (86, False): ((86, 89, 120), ()),
}


def backward_cases() -> Iterator[Case]:
    """In every run: the larger kernel on each chip, the other on two; the rest in `make aot`."""
    for kernel in (_dk_dv_kernel, _dq_kernel):
        for kind, described in BACKWARD:
            every = _EVERY_RUN.get((kind, described), ((), ()))[kernel is _dq_kernel]
            rest = tuple(c for c in SHARED_BYTES if chip_class(c) == kind and c not in every)
            for chips in filter(None, (every, rest)):
                yield _case(kernel, kind, 128, described=described, capabilities=chips, every_run=chips is every)
            for head_dim in (64, 80, 256):
                yield _case(kernel, kind, head_dim, described=described)
            for head_dim in (64, 80, 128, 256):
                yield _case(kernel, kind, head_dim, described=described, causal=False, heads_each=1)
                if not (described and kernel is _dq_kernel):
                    yield _case(kernel, kind, head_dim, described=described, padding=True)
    for head_dim in (64, 80, 256):
        yield _delta(head_dim)
