"""What `quantize_` did: matrix by matrix, with the error that each one's output has on the calibration text."""

import math
from dataclasses import dataclass, field

import torch

from labkit._table import Table


@dataclass(frozen=True)
class MatrixReport:
    """One matrix: its stored `bits_per_weight` with scales, zero points and indices; `error` is the mean squared error
    of its output over that output's mean square on the calibration text, None where there was none."""

    name: str
    bits: int
    nbytes: int
    elements: int
    error: float | None

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
    second moments `gram` of the inputs alone.
    """
    difference = approximation.double() - weight.double()
    gram = gram.double()
    noise = ((difference @ gram) * difference).sum().item()
    signal = ((weight.double() @ gram) * weight.double()).sum().item()
    return noise / signal if signal > 0 else math.nan
