"""FP8: weights and inputs in float8_e4m3fn, multiplied as they are where the device can.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022: 4 bits of exponent and 3 of mantissa reach from 2^-9 to 448
with neighbours 6 to 12% apart, so that one scale a row is enough, and no outliers have to be moved.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit import _check
from labkit.kernels import BackendUnavailable
from labkit.quantization.calibration import LayerResult, LayerTask, Replacement
from labkit.quantization.row_scaled import RowScaledLinear, row_scales

_DTYPE = torch.float8_e4m3fn
_TOP = torch.finfo(_DTYPE).max
_CAPABILITY = (8, 9)
# A GPU's row-wise FP8 matmul loads 16 bytes at a time.
_MULTIPLE = 16


@dataclass(frozen=True)
class FP8Config:
    """float8_e4m3fn with one scale a row of weights and one a token of inputs: there is nothing to choose."""

    @property
    def bits(self) -> int:
        """Of a weight, and of an input."""
        return 8


@functools.cache
def why_no_fp8(device: torch.device) -> str:
    """Why a device has no FP8 matmul; empty where it has one. A CPU is tried out: PyTorch's works on some."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _CAPABILITY:
            return ""
        name, (major, minor) = torch.cuda.get_device_name(device), capability
        return f"{name} has compute capability {major}.{minor}, and FP8 matmuls came with 8.9 (Ada) and 9.0 (Hopper)"
    try:
        ones = torch.ones(16, 16, device=device).to(_DTYPE)
        y = _scaled_mm(ones, torch.ones(16, 1, device=device), ones, torch.ones(16, device=device))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"PyTorch has no FP8 matmul for the {device.type} here ({str(error).splitlines()[0][:120]})"
    return "" if bool((y == 16).all()) else f"PyTorch's FP8 matmul on the {device.type} gives wrong sums here"


def _scaled_mm(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Codes `x (rows, in)` with scales `(rows, 1)` times transposed codes `weight (out, in)` with scales `(out,)`.

    A GPU's row-wise kernels write bfloat16 alone; on a CPU float32 keeps the sums as they are.
    """
    dtype = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    return torch._scaled_mm(x, weight.T, scale_a=x_scales, scale_b=scales[None], out_dtype=dtype)


class FP8Linear(RowScaledLinear):
    """Weights and inputs in float8_e4m3fn. On a CPU the matmul is PyTorch's too, exact, and slower than bfloat16."""

    code_dtype = _DTYPE

    def multiply(self, rows: Tensor) -> Tensor:
        reason = why_no_fp8(rows.device)
        if reason:
            raise BackendUnavailable(f"FP8Linear cannot run: {reason}")
        scales = row_scales(rows, _TOP)
        return _scaled_mm((rows.float() / scales).to(_DTYPE), scales, self.qweight, self.scales)


def quantize_rows(weight: Tensor, bias: Tensor | None = None) -> FP8Linear:
    """`weight (out_features, in_features)` rounded to float8_e4m3fn, one scale a row."""
    scales = row_scales(weight, _TOP)
    return FP8Linear((weight.float() / scales).to(_DTYPE), scales[:, 0], bias)


def check_linears(linears: Mapping[str, nn.Linear]) -> None:
    """Refuse, before anything is touched, a device without FP8 matmuls, and sides that they do not take."""
    for name, linear in linears.items():
        device = linear.weight.device
        reason = why_no_fp8(device)
        takes = "a model on a GPU of compute capability 8.9 or above, or on a CPU where torch._scaled_mm runs"
        _check.require(not reason, "model", f"one on {device}: {reason}" if reason else "", takes)
        fits = device.type == "cpu" or not any(size % _MULTIPLE for size in linear.weight.shape)
        got = f"nothing that keeps {name} out, which is {' x '.join(map(str, linear.weight.shape))}"
        takes = f"its name: a GPU multiplies FP8 matrices whose sides are multiples of {_MULTIPLE}"
        _check.require(fits, "modules_to_not_convert", got, takes)


def quantize_layer(task: LayerTask) -> LayerResult:
    """Every matrix of the task; no calibration is needed. A reported error is that of the weights alone."""
    found = {name: quantize_rows(linear.weight, linear.bias) for name, linear in task.linears.items()}
    return LayerResult({name: Replacement(module, module.dequantize()) for name, module in found.items()})
