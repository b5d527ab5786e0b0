"""`x @ weight.T` with a packed weight: fewer bytes a weight, which is what a decode step waits for.

A weight comes portable (`PackedWeight`) or laid out: for PyTorch's packed matmul on the CPU (`Int4PackWeight`) or for
the Triton kernel (`InterleavedWeight`). "triton" is that kernel. "torch" is PyTorch's packed matmul where the weight is
laid out for it, else the weight is dequantized (on a GPU by a kernel, where it is laid out) and multiplied by the
library. "reference" is the definition in float32.
"""

import torch
import torch.nn.functional as F

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice, why_no_triton
from labkit.kernels.quantized_linear import int4pack, interleaved
from labkit.kernels.quantized_linear.int4pack import Int4PackWeight
from labkit.kernels.quantized_linear.interleaved import InterleavedWeight
from labkit.kernels.quantized_linear.reference import quantized_linear_reference
from labkit.kernels.types import PackedWeight

BACKENDS = ("triton", "torch", "reference")
Weight = PackedWeight | Int4PackWeight | InterleavedWeight
_HALVES = (torch.bfloat16, torch.float16)

__all__ = [
    "BACKENDS",
    "Int4PackWeight",
    "InterleavedWeight",
    "Weight",
    "choose",
    "decode_layout",
    "portable",
    "quantized_linear",
]


def portable(weight: Weight) -> PackedWeight:
    """The weight in the order that depends on no processor; the same object where it is that."""
    return weight if isinstance(weight, PackedWeight) else weight.unpack()


def decode_layout(weight: Weight, dtype: torch.dtype) -> Weight:
    """The weight as it is fastest to decode with, where activations have `dtype`; the same object where it is that.

    Codes and scales exactly; on the CPU at 4 bits the product's offset is rounded (`int4pack` says by how much).
    """
    room, wanted = _layout_room(weight, dtype)
    if isinstance(weight, PackedWeight) and wanted is not PackedWeight and room.why_not(weight):
        wanted = PackedWeight
    if isinstance(weight, wanted):
        return weight
    return portable(weight) if wanted is PackedWeight else wanted.of(portable(weight))


def _layout_room(weight: Weight, dtype: torch.dtype) -> tuple[object, type]:
    """The layout for this device and dtype, and its file; whether it can hold this weight is another question."""
    if weight.device.type == "cuda" and dtype in _HALVES and why_no_triton(weight.device) is None:
        return interleaved, InterleavedWeight
    if weight.device.type == "cpu" and dtype is torch.bfloat16:
        return int4pack, Int4PackWeight
    return None, PackedWeight


def _check_tensors(x: torch.Tensor, weight: Weight) -> None:
    """Refuse what cannot be multiplied; a step comes here for each of its matrices, so sentences are made only then."""
    both = isinstance(x, torch.Tensor) and isinstance(weight, Weight)
    if both and x.ndim and x.shape[-1] == weight.in_features and x.is_floating_point() and x.device == weight.device:
        return
    _check.tensor("x", x)
    _check.require(both, "weight", type(weight).__name__, "a PackedWeight")
    got = f"shape {tuple(x.shape)} in {x.dtype} on {x.device}"
    _check.require(False, "x", got, f"floating-point (..., {weight.in_features}) on {weight.device}")


def choose(x: torch.Tensor, weight: Weight) -> Choice:
    """As `choose_backend("quantized_linear", x, weight)`."""
    _check_tensors(x, weight)
    if isinstance(weight, Int4PackWeight):
        return _choose_int4pack(x, weight)
    if isinstance(weight, InterleavedWeight):
        return _choose_interleaved(x, weight)
    room, wanted = _layout_room(weight, x.dtype)
    if wanted is PackedWeight:
        room = interleaved if weight.device.type == "cuda" else int4pack
    serves = "the Triton kernel" if room is interleaved else "the packed matmul"
    reason = room.why_not(weight)
    if reason is None and wanted is PackedWeight:
        reason = why_no_triton(weight.device) if room is interleaved else None
        in_what = "bfloat16 and float16" if room is interleaved else "bfloat16 alone"
        reason = reason or f"it is fast in {in_what}, and x is {_name(x.dtype)}"
    reason = reason or "the weight is not laid out for it (decode_layout does that)"
    return Choice("torch", f"dequantize, then the library's matmul; {serves} does not serve: {reason}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _choose_int4pack(x: torch.Tensor, weight: Int4PackWeight) -> Choice:
    if x.dtype is torch.bfloat16:
        halves = "" if weight.bits == 4 else ", over both halves of the 8 bits"
        return Choice("torch", f"PyTorch's packed 4-bit matmul{halves}")
    return Choice("torch", "the weight is laid out for bfloat16: x is converted to it and back")


def _choose_interleaved(x: torch.Tensor, weight: InterleavedWeight) -> Choice:
    """On a CPU the interpreter runs only where it is asked for: it is for looking, and slow."""
    reason = _why_not_kernel(x, weight)
    if reason is None and weight.device.type != "cuda":
        reason = "its interpreter runs for backend='triton' alone"
    if reason is not None:
        return Choice("torch", f"dequantize, then the library's matmul; the Triton kernel does not serve: {reason}")
    from labkit.kernels.quantized_linear import triton as room

    rows, least = x.numel() // weight.in_features, room.DEQUANTIZE_FROM_ROWS
    if rows >= least:
        return Choice("torch", f"{rows} rows; from {least} on, dequantizing costs less than the library's matmul gains")
    tile = room.tile_for(rows)
    how = f"split over K, {tile.block_n} outputs by {tile.block_m} rows" if tile.programs else "a tile a program"
    return Choice("triton", f"the packed kernel for {rows} rows: {how}")


def _why_not_kernel(x: torch.Tensor, weight: Weight) -> str | None:
    """Why the Triton kernel cannot multiply these two, or None."""
    if reason := why_no_triton(weight.device):
        return reason
    if not isinstance(weight, InterleavedWeight) and (reason := interleaved.why_not(portable(weight))):
        return reason
    if torch.is_grad_enabled() and x.requires_grad:
        return "it has no backward pass, and x requires a gradient"
    if weight.device.type == "cpu" and x.dtype is not torch.float16:
        return f"Triton's interpreter multiplies float16 rightly, and x is {_name(x.dtype)}"
    return None if x.dtype in _HALVES else f"it takes bfloat16 and float16, and x is {_name(x.dtype)}"


def _torch(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    if isinstance(weight, InterleavedWeight) and weight.device.type == "cuda" and not why_no_triton(weight.device):
        from labkit.kernels.quantized_linear import triton as room

        return F.linear(x, room.dequantize(weight, x.dtype))
    if not isinstance(weight, Int4PackWeight):
        return F.linear(x, weight.dequantize(x.dtype))
    rows = x.reshape(-1, weight.in_features)
    if not rows.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.out_features)
    y = weight.multiply(rows.to(torch.bfloat16).contiguous())
    return y.view(*x.shape[:-1], weight.out_features).to(x.dtype)


def _triton(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """A weight that is not laid out for the kernel is, for this one product."""
    if reason := _why_not_kernel(x, weight):
        raise BackendUnavailable(f"quantized_linear: backend 'triton' cannot run: {reason}")
    from labkit.kernels.quantized_linear import triton as room

    weight = weight if isinstance(weight, InterleavedWeight) else InterleavedWeight.of(portable(weight))
    rows = x.reshape(-1, weight.in_features)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return room.multiply(rows, weight).view(*x.shape[:-1], weight.out_features)


def quantized_linear(x: torch.Tensor, weight: Weight, *, backend: str = "auto") -> torch.Tensor:
    """`x (..., in_features)` times the transposed weight `(out_features, in_features)`: `(..., out_features)`.

    Errors: ValueError for shapes that do not fit; BackendUnavailable where a backend asked for by name cannot run.
    """
    _check_tensors(x, weight)
    if backend == "auto":
        on_cpu = weight.device.type == "cpu"
        backend = "torch" if on_cpu or isinstance(weight, PackedWeight) else choose(x, weight).name
    if backend == "torch":
        return _torch(x, weight)
    if backend == "triton":
        return _triton(x, weight)
    _check.choice("backend", backend, ("auto", *BACKENDS))
    return quantized_linear_reference(x, portable(weight))
