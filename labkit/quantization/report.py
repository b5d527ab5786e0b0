"""What `quantize_` did: matrix by matrix, with the error that each one's output has on the calibration text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from labkit._table import Table
from labkit.quantization.packing import weight_bytes


@dataclass(frozen=True)
class MatrixReport:
    """One matrix: its stored `bits_per_weight` with scales, zero points and indices; `error` is the mean squared error
    of its output over that output's mean square on the calibration text, None where there was none."""

    name: str
    bits: int
    nbytes: int
    elements: int
    error: float | None

    @classmethod
    def of(cls, name: str, bits: int, module: nn.Module, error: float | None = None) -> MatrixReport:
        """Of a quantized linear layer, whose bias is no part of the matrix."""
        nbytes = weight_bytes(module) - (0 if module.bias is None else module.bias.nbytes)
        return cls(name, bits, nbytes, module.in_features * module.out_features, error)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.elements


@dataclass(frozen=True)
class QuantizationReport:
    """All matrices in the model's order, `notes` on what did not go as a matter of course, and the time it took."""

    config: object
    matrices: tuple[MatrixReport, ...]
    notes: tuple[str, ...] = field(default=())
    seconds: float = 0.0

    @property
    def bits_per_weight(self) -> float:
        """Stored bits a weight over all matrices that were quantized."""
        return 8 * sum(m.nbytes for m in self.matrices) / sum(m.elements for m in self.matrices)

    def table(self) -> Table:
        """A row a matrix."""
        rows = tuple(
            (m.name, str(m.bits), f"{m.bits_per_weight:.2f}", "" if m.error is None else f"{m.error:.2%}")
            for m in self.matrices
        )
        return Table(("matrix", "bits", "bits stored", "output error"), rows)

    def __repr__(self) -> str:
        size = f"{len(self.matrices)} matrices, {self.bits_per_weight:.2f} bits a weight"
        return "\n".join([f"{self.config}: {size}, {self.seconds:.1f} s", *self.notes])


def output_error(weight: torch.Tensor, approximation: torch.Tensor, gram: torch.Tensor) -> float:
    """Mean squared error of a matrix's output over the calibration tokens, as a part of the output's mean square.

    tr(D G D^T) / tr(W G W^T), D the difference of the two `(out_features, in_features)`: GPTQ's equation 1, from the
    second moments `gram` of the inputs alone. Products are in float32, as a wide matrix in float64 takes a consumer GPU
    as long as GPTQ itself; sums are in float64.
    """
    weight = weight.float()
    noise, signal = (_mean_square(matrix, gram.float()) for matrix in (approximation.float() - weight, weight))
    return noise / signal if signal > 0 else math.nan


def _mean_square(matrix: torch.Tensor, gram: torch.Tensor) -> float:
    """tr(M G M^T); rounding could take it below 0."""
    return (matrix @ gram).mul_(matrix).sum(dtype=torch.float64).clamp_min(0.0).item()
