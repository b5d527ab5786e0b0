"""What `quantization_lab` finds out: its parameters; bytes, errors, perplexity and speed of a packed model."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from labkit import _check
from labkit.labs import _quantization_forms as forms
from labkit.labs._result import Number
from labkit.measure import Measurement, Timing
from labkit.quantization.primitives import check_format
from labkit.quantization.recorded import RecordedRun

METHODS = ("RTN", "AWQ", "GPTQ")


@dataclass(frozen=True)
class QuantizationParams:
    """One setting of the lab; `group_size` -1 is one group a row."""

    bits: int
    group_size: int
    method: str
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        check_format(self.bits, self.group_size, False)
        _check.choice("method", self.method, METHODS)


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors that are really packed: `code_bytes` of codes alone, `packed_bytes` with scales, zero points and
    indices; `other_bytes` of what stays in bfloat16; `float_bytes` of the whole model in bfloat16. `weights` counts
    the elements of the matrices that are packed."""

    weights: int
    code_bytes: int
    packed_bytes: int
    other_bytes: int
    float_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, over the matrices that are packed."""
        return 8 * self.packed_bytes / self.weights

    @property
    def code_bits(self) -> float:
        """Of those, the bits of the codes."""
        return 8 * self.code_bytes / self.weights

    @property
    def model_bytes(self) -> int:
        """The whole model as it is stored."""
        return self.packed_bytes + self.other_bytes

    @property
    def ratio(self) -> float:
        """To the bfloat16 model."""
        return self.model_bytes / self.float_bytes


@dataclass(frozen=True)
class LayerErrors:
    """Output error of each matrix under round-to-nearest, by kind and then layer, as a part of the output's mean
    square over `tokens` tokens."""

    by_kind: Mapping[str, tuple[float, ...]]
    tokens: int

    @property
    def all(self) -> list[float]:
        """Of all matrices."""
        return [error for errors in self.by_kind.values() for error in errors]

    @property
    def median(self) -> float:
        """Of all matrices."""
        return statistics.median(self.all)

    @property
    def worst(self) -> tuple[str, int, float]:
        """Kind, layer and error of the matrix that loses most."""
        each = ((kind, i, error) for kind, errors in self.by_kind.items() for i, error in enumerate(errors))
        return max(each, key=lambda found: found[2])


@dataclass(frozen=True)
class BlockErrors:
    """Output error by kind of one decoder layer's matrices, by a method and by round-to-nearest, over the same tokens;
    which the method, in `seconds`, did not see: it was calibrated on `calibration_tokens` others."""

    layer: int
    method: str
    errors: Mapping[str, float]
    rtn: Mapping[str, float]
    calibration_tokens: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Geometric mean over the matrices of the method's error to round-to-nearest's."""
        least = 1e-30  # of a matrix without an error there is no logarithm
        ratios = (max(self.errors[kind], least) / max(self.rtn[kind], least) for kind in self.errors)
        return statistics.geometric_mean(ratios)


@dataclass(frozen=True)
class Quality:
    """Perplexity over `windows` of `of_windows` windows of `context_length` tokens, and the float model's over the
    same."""

    perplexity: float
    baseline: float
    windows: int
    of_windows: int
    context_length: int

    @property
    def firm(self) -> bool:
        return self.windows == self.of_windows


@dataclass(frozen=True)
class Speed:
    """A decode step of a bfloat16 model: seconds, the bytes of weights that it reads, the backend of its matrices and
    why; `bandwidth` is the measured ceiling in bytes/s."""

    step: Timing
    read_bytes: int
    backend: str
    reason: str
    packed_matmul: bool
    bandwidth: float

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.step.median

    @property
    def ceiling(self) -> float:
        """Tokens/s if reading the weights took all the time."""
        return self.bandwidth / self.read_bytes

    @property
    def fraction(self) -> float:
        """Share of the ceiling reached; above 1 where a cache served what the ceiling takes from memory."""
        return self.tokens_per_second / self.ceiling


@dataclass(frozen=True)
class QuantizationResult:
    """What is known of a setting so far; None or empty where it has not been measured.

    `recorded` is the whole model by AWQ or GPTQ, from an earlier run; `not_recorded` says why there is none.
    """

    params: QuantizationParams
    device: str
    dtype: str
    corpus: str
    sizes: Sizes
    num_layers: int
    layers: LayerErrors | None = None
    block: BlockErrors | None = None
    recorded: RecordedRun | None = None
    not_recorded: str = ""
    speed: Speed | None = None
    float_speed: Speed | None = None
    quality: Quality | None = None

    @property
    def perplexity(self) -> float | None:
        """Measured or recorded."""
        found = self.quality or self.recorded
        return None if found is None else found.perplexity

    @property
    def baseline(self) -> float | None:
        """The float model's, over the same windows."""
        found = self.quality or self.recorded
        return None if found is None else found.baseline

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
