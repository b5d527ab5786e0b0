"""Keys or values to codes of 8, 4 or 2 bits, asymmetric, with a scale and a minimum for each group.

"triton" reads x once and writes codes, scales and minimums. "torch" does the same steps in PyTorch, a part of the heads
at a time, so that no float32 copy of a long cache appears. "reference" is the definition. All give the same bytes.
"""

import torch

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice, why_no_triton
from labkit.kernels.kv_quantize.reference import kv_quantize_reference
from labkit.kernels.kv_types import QuantizedKV, check_grid

BACKENDS = ("triton", "torch", "reference")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements that are worked on in float32 at a time.
_AT_ONCE = 1 << 20

__all__ = ["BACKENDS", "choose", "kv_quantize"]


def _why_not_triton(x: torch.Tensor, group_size: int | None, axis: str | None) -> str | None:
    if reason := why_no_triton(x.device):
        return reason
    if group_size is None:
        return None
    from labkit.kernels.kv_quantize import triton as room

    return room.why_not(x, group_size, axis)


def choose(x: torch.Tensor) -> Choice:
    """As `choose_backend("kv_quantize", x)`."""
    _check.tensor("x", x, ndim=4, dtypes=_DTYPES)
    return _choose(x, None, None)


def _choose(x: torch.Tensor, group_size: int | None, axis: str | None) -> Choice:
    reason = _why_not_triton(x, group_size, axis)
    if reason is None and x.device.type != "cuda":
        reason = "its interpreter runs for backend='triton' alone"
    if reason is not None:
        return Choice("torch", f"PyTorch, some heads at a time; the Triton kernel does not serve: {reason}")
    return Choice("triton", "the kernel that reads each number once")


def _torch(x: torch.Tensor, bits: int, group_size: int, axis: str, scales_dtype: torch.dtype) -> QuantizedKV:
    n, heads, length, head_dim = x.shape
    grid = check_grid(tuple(x.shape), bits, group_size, axis)
    codes = torch.empty(n, heads, length, head_dim * bits // 8, dtype=torch.uint8, device=x.device)
    scales, minimums = (torch.empty(grid, dtype=scales_dtype, device=x.device) for _ in range(2))
    step = max(1, _AT_ONCE // max(1, length * head_dim))
    for row in range(n):
        for head in range(0, heads, step):
            at = (slice(row, row + 1), slice(head, head + step))
            part = kv_quantize_reference(x[at], bits, group_size, axis, scales_dtype)
            codes[at], scales[at], minimums[at] = part.codes, part.scales, part.minimums
    return QuantizedKV(codes, scales, minimums, None, None, bits, group_size, axis)


def kv_quantize(
    x: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    axis: str,
    scales_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> QuantizedKV:
    """Quantize `x (n, num_key_value_heads, length, head_dim)`, of bfloat16, float16 or float32.

    Axis "channel": `group_size` consecutive tokens of a channel share scale and minimum, for keys; axis "token":
    `group_size` consecutive channels of a token do, for values (KIVI, Liu et al., 2024, section 3). `scales_dtype` is
    x's dtype, and bfloat16 for float32, unless said otherwise. Codes are chosen with the rounded scale and minimum. A
    constant group has scale 0 and comes back as its minimum, exactly where `scales_dtype` holds it. A group with a NaN
    or an infinity in it comes back as NaN.
    Errors: ValueError for arguments that do not fit; BackendUnavailable where a backend asked for by name cannot run.
    """
    _check.tensor("x", x, ndim=4, dtypes=_DTYPES)
    _check.require(x.shape[3] > 0, "x", f"shape {tuple(x.shape)}", "a head_dim of at least 1")
    check_grid(tuple(x.shape), bits, group_size, axis)
    if scales_dtype is None:
        scales_dtype = torch.bfloat16 if x.dtype is torch.float32 else x.dtype
    _check.choice("scales_dtype", scales_dtype, _DTYPES)
    if backend == "auto":
        backend = _choose(x, group_size, axis).name if x.is_cuda else "torch"
    if backend == "torch":
        return _torch(x, bits, group_size, axis, scales_dtype)
    if backend == "triton":
        if reason := _why_not_triton(x, group_size, axis):
            raise BackendUnavailable(f"kv_quantize: backend 'triton' cannot run: {reason}")
        from labkit.kernels.kv_quantize import triton as room

        return room.quantize(x, bits, group_size, axis, scales_dtype)
    _check.choice("backend", backend, ("auto", *BACKENDS))
    return kv_quantize_reference(x, bits, group_size, axis, scales_dtype)
