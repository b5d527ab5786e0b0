"""SmoothQuant: 8-bit weights and 8-bit inputs, once the inputs' outliers have been moved into the weights.

Xiao, Lin, Seznec, Wu, Demouth and Han, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models", ICML 2023, equation 4. INT8 times INT8 is summed in INT32, which a tensor core does at twice the rate
of bfloat16: so it helps prefill and large batches, where weight-only quantization does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kernels import BackendUnavailable
from labkit.models import LoadedModel
from labkit.quantization.calibration import LayerResult, LayerTask, Replacement
from labkit.quantization.folding import Link, fold, fold_model_, note_what_is_not_scaled, scaled_together
from labkit.quantization.row_scaled import RowScaledLinear, row_scales

_TOP = 127
# What cuBLAS takes: more rows than this, and widths that its vector loads divide.
_FEWEST_ROWS, _MULTIPLE = 17, 8
# 127 * 127 * this many products still fit into 32 bits.
_MOST_FEATURES = (2**31 - 1) // _TOP**2


@dataclass(frozen=True)
class SmoothQuantConfig:
    """`alpha`: how much of the difficulty goes from inputs to weights, 0 to 1; None moves nothing."""

    alpha: float | None = 0.5

    def __post_init__(self) -> None:
        if self.alpha is not None:
            _check.number("alpha", self.alpha, 0.0, 1.0)

    @property
    def bits(self) -> int:
        """Of a weight, and of an input."""
        return 8


def int8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """`x (rows, in_features)` int8 times the transposed `weight (out_features, in_features)` int8: exact, in int32.

    Errors: BackendUnavailable on a GPU for widths that its matmul does not take.
    """
    if x.device.type == "cpu":
        return torch._int_mm(x, weight.T)
    reason = _why_not(weight)
    if reason:
        raise BackendUnavailable(f"int8_matmul cannot run: {reason}")
    rows = len(x)
    padded = F.pad(x, (0, 0, 0, max(0, _FEWEST_ROWS - rows)))
    return torch._int_mm(padded, weight.T)[:rows]


def _why_not(weight: Tensor) -> str:
    """Why a GPU's INT8 matmul does not take this matrix; empty where it does, and on a CPU."""
    odd = [size for size in weight.shape if size % _MULTIPLE]
    if weight.device.type == "cpu" or not odd:
        return ""
    shape = " x ".join(map(str, weight.shape))
    return f"a GPU multiplies INT8 matrices whose sides are multiples of {_MULTIPLE}, and this one has {shape}"


class Int8Linear(RowScaledLinear):
    """Weights and inputs in INT8, products summed in INT32: y = (q_x q_w^T) s_x s_w + b."""

    code_dtype = torch.int8

    def multiply(self, rows: Tensor) -> Tensor:
        scales = row_scales(rows, _TOP)
        codes = (rows.float() / scales).round_().to(torch.int8)
        return int8_matmul(codes, self.qweight).float().mul_(scales).mul_(self.scales)


def quantize_rows(weight: Tensor, bias: Tensor | None = None) -> Int8Linear:
    """`weight (out_features, in_features)` rounded to INT8, symmetric, one scale a row."""
    scales = row_scales(weight, _TOP)
    return Int8Linear((weight.float() / scales).round_().to(torch.int8), scales[:, 0], bias)


def check_linears(linears: Mapping[str, nn.Linear]) -> None:
    """Refuse, before anything is touched, matrices that cannot be multiplied in INT8 where they are."""
    for name, linear in linears.items():
        fits = linear.in_features <= _MOST_FEATURES
        got = f"{name} of {linear.in_features} input features"
        _check.require(fits, "model", got, f"at most {_MOST_FEATURES}, whose products INT32 can sum")
        reason = _why_not(linear.weight)
        _check.require(not reason, "modules_to_not_convert", f"nothing that keeps {name} out", f"its name: {reason}")


def smoothing_scale(max_inputs: Tensor, max_weights: Tensor, alpha: float) -> Tensor:
    """Equation 4: s_j = max|x_j|^alpha / max|w_j|^(1 - alpha), `(channels,)`; inputs are divided by it.

    1 where a channel has no input or no weight, since nothing is to be balanced there.
    """
    scale = max_inputs**alpha / max_weights ** (1 - alpha)
    known = (max_inputs > 0) & (max_weights > 0)
    return torch.where(known, scale, 1.0).clamp(1e-5, 1e5)


def find_scales(task: LayerTask) -> dict[Link, Tensor]:
    """Equation 4 at each place of the layer where a scale can be folded and a reader is to be quantized."""
    found = {}
    for link, names in scaled_together(task) if task.config.alpha is not None else ():
        columns = torch.stack([task.linears[name].weight.float().abs().amax(0) for name in names]).amax(0)
        inputs = task.statistics[names[0]].max_abs
        _check.require(bool(inputs.isfinite().all()), "calibration", "NaN or an infinity", "finite inputs")
        channels = (link.by_channel(values, torch.amax) for values in (inputs, columns))
        found[link] = smoothing_scale(*channels, task.config.alpha)
    return found


def quantize_layer(task: LayerTask) -> LayerResult:
    """Scales folded, then every matrix rounded. The error that is reported is that of the weights alone; what rounding
    the inputs adds shows only in what the model says."""
    folded = fold(task.module, find_scales(task))
    local = {name: name.removeprefix(f"{task.name}.") for name in task.linears}
    if task.config.alpha is not None:
        note_what_is_not_scaled(task)
    found: dict[str, Replacement] = {}
    for name, linear in task.linears.items():
        module = quantize_rows(folded.weight(local[name], linear), folded.bias(local[name], linear))
        found[name] = Replacement(module, folded.undo(local[name], module.dequantize()))
    return LayerResult(found, folded.writes({local[name] for name in found}))


def smooth_(model: PreTrainedModel | LoadedModel, config: SmoothQuantConfig, calibration: Tensor) -> None:
    """Only the migration, in place: the model computes what it did before, from inputs that are easier to round.

    calibration: token ids `(n_samples, seq_len)`. Errors: ValueError.
    """
    _check.require(isinstance(config, SmoothQuantConfig), "config", type(config).__name__, "a SmoothQuantConfig")
    fold_model_(model, config, calibration, find_scales)
