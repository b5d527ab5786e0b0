"""`x @ weight.T` with a packed weight: fewer bytes a weight, which is what a decode step waits for.

"torch" runs a weight laid out for PyTorch's packed matmul (`Int4PackWeight`) through that op, and a portable one
(`PackedWeight`) by dequantizing it and multiplying with the library's matmul. "reference" is the definition in float32.
"""

import torch
import torch.nn.functional as F

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice
from labkit.kernels.quantized_linear.int4pack import Int4PackWeight, why_not
from labkit.kernels.quantized_linear.reference import quantized_linear_reference
from labkit.kernels.types import PackedWeight

BACKENDS = ("torch", "reference")

__all__ = ["BACKENDS", "Int4PackWeight", "choose", "decode_layout", "quantized_linear"]


def decode_layout(weight: PackedWeight | Int4PackWeight, dtype: torch.dtype) -> PackedWeight | Int4PackWeight:
    """The weight as it is fastest to decode with, where activations have `dtype`; the same object where it is that.

    Codes and scales exactly; at 4 bits the product's offset is rounded (`int4pack` says by how much).
    """
    packed = isinstance(weight, Int4PackWeight)
    wanted = dtype is torch.bfloat16 and (packed or why_not(weight) is None)
    if packed == wanted:
        return weight
    return weight.unpack() if packed else Int4PackWeight.of(weight)


def _check_tensors(x: torch.Tensor, weight: PackedWeight | Int4PackWeight) -> None:
    """Refuse what cannot be multiplied; a step comes here for each of its matrices, so sentences are made only then."""
    both = isinstance(x, torch.Tensor) and isinstance(weight, PackedWeight | Int4PackWeight)
    if both and x.ndim and x.shape[-1] == weight.in_features and x.is_floating_point() and x.device == weight.device:
        return
    _check.tensor("x", x)
    _check.require(both, "weight", type(weight).__name__, "a PackedWeight")
    got = f"shape {tuple(x.shape)} in {x.dtype} on {x.device}"
    _check.require(False, "x", got, f"floating-point (..., {weight.in_features}) on {weight.device}")


def choose(x: torch.Tensor, weight: PackedWeight | Int4PackWeight) -> Choice:
    """As `choose_backend("quantized_linear", x, weight)`."""
    _check_tensors(x, weight)
    if isinstance(weight, Int4PackWeight):
        if x.dtype is torch.bfloat16:
            halves = "" if weight.bits == 4 else ", over both halves of the 8 bits"
            return Choice("torch", f"PyTorch's packed 4-bit matmul{halves}")
        return Choice("torch", "the weight is laid out for bfloat16: x is converted to it and back")
    reason = why_not(weight)
    if reason is None and x.dtype is not torch.bfloat16:
        reason = f"it is fast in bfloat16 alone, and x is {str(x.dtype).removeprefix('torch.')}"
    reason = reason or "the weight is not laid out for it (decode_layout does that)"
    return Choice("torch", f"dequantize, then the library's matmul; the packed matmul does not serve: {reason}")


def _torch(x: torch.Tensor, weight: PackedWeight | Int4PackWeight) -> torch.Tensor:
    if isinstance(weight, PackedWeight):
        return F.linear(x, weight.dequantize(x.dtype))
    rows = x.reshape(-1, weight.in_features)
    if not rows.shape[0]:
        return x.new_empty(*x.shape[:-1], weight.out_features)
    y = weight.multiply(rows.to(torch.bfloat16).contiguous())
    return y.view(*x.shape[:-1], weight.out_features).to(x.dtype)


def quantized_linear(x: torch.Tensor, weight: PackedWeight | Int4PackWeight, *, backend: str = "auto") -> torch.Tensor:
    """`x (..., in_features)` times the transposed weight `(out_features, in_features)`: `(..., out_features)`.

    Errors: ValueError for shapes that do not fit; BackendUnavailable where a backend asked for by name cannot run.
    """
    _check_tensors(x, weight)
    if backend in ("auto", "torch"):
        return _torch(x, weight)
    if backend == "triton":
        raise BackendUnavailable("quantized_linear: backend 'triton' cannot run: there is no such kernel yet")
    _check.choice("backend", backend, ("auto", "triton", *BACKENDS))
    portable = weight.unpack() if isinstance(weight, Int4PackWeight) else weight
    return quantized_linear_reference(x, portable)
