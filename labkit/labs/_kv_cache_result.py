"""What `kv_cache_lab` finds out: its parameters; bytes of a cache, the time to attend to it, what rounding it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit import _check
from labkit.attention import MergeStudy
from labkit.kv_cache import bits_per_value
from labkit.labs import _kv_cache_forms as forms
from labkit.labs._result import Number
from labkit.measure import Measurement, Timing

FULL = 16
BITS = (FULL, 8, 4, 2)
SEQ_LENS = tuple(2**power for power in range(8, 16))


@dataclass(frozen=True)
class KVCacheParams:
    """One setting of the lab: one sequence of `seq_len` tokens; `bits` 16 is a cache that is not quantized, and has no
    groups and no recent part."""

    seq_len: int
    num_key_value_heads: int
    bits: int
    q_group_size: int = 32
    residual_length: int = 32
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        _check.integer("seq_len", self.seq_len, 2)
        _check.integer("num_key_value_heads", self.num_key_value_heads, 1)
        _check.choice("bits", _check.integer("bits", self.bits), BITS)
        _check.integer("q_group_size", self.q_group_size, 1)
        _check.integer("residual_length", self.residual_length, 0)

    @property
    def quantized(self) -> bool:
        return self.bits != FULL

    @property
    def bits_per_value(self) -> float:
        """With the share of a scale and a minimum; of a long cache, whose recent tokens count for nothing."""
        return bits_per_value(self.bits, self.q_group_size) if self.quantized else FULL


@dataclass(frozen=True)
class Sizes:
    """Bytes of a cache. `allocated`: counted from the tensors of `layers_allocated` of `num_layers` equal layers.
    `predicted`: of all layers, by the formula; `full` the same tokens and heads in 16 bits, and `own` the model's own
    heads in 16 bits, by the formula. `recent_tokens` are in 16 bits. `weights`: of the model in 16 bits; `free`: the
    memory that was free before. `curves`: predicted bytes at these heads by bits and length."""

    predicted: int
    allocated: int
    layers_allocated: int
    num_layers: int
    recent_tokens: int
    full: int
    own: int
    weights: int
    free: int
    curves: Mapping[int, Mapping[int, int]]

    @property
    def layer(self) -> int:
        """Bytes of one layer, counted."""
        return self.allocated // self.layers_allocated

    @property
    def total(self) -> int:
        """Bytes of all layers, by those that were counted."""
        return self.allocated * self.num_layers // self.layers_allocated

    @property
    def smaller(self) -> float:
        """How many times smaller than the model's own cache in 16 bits."""
        return self.own / self.total


@dataclass(frozen=True)
class Speed:
    """One layer's attention of one new token: seconds over this cache and, in turn with it, over the same tokens in 16
    bits; bytes that each has to read; `bandwidth` is the measured ceiling in bytes/s."""

    timing: Timing
    read_bytes: int
    full: Timing
    full_bytes: int
    backend: str
    reason: str
    bandwidth: float

    @property
    def floor_s(self) -> float:
        """Seconds that the bandwidth allows for these bytes."""
        return self.read_bytes / self.bandwidth

    @property
    def fraction(self) -> float:
        """Share of the ceiling reached; above 1 where a cache served what the ceiling takes from memory."""
        return self.floor_s / self.timing.median

    @property
    def speedup(self) -> float:
        """Over 16 bits; below 1 it is slower."""
        return self.full.median / self.timing.median


@dataclass(frozen=True)
class Quality:
    """Perplexity of the model that reads its past out of this cache, and out of one in full precision, over the first
    `scored` of `of` tokens."""

    perplexity: float
    baseline: float
    scored: int
    of: int

    @property
    def firm(self) -> bool:
        return self.scored == self.of

    @property
    def ratio(self) -> float:
        return self.perplexity / self.baseline


@dataclass(frozen=True)
class KVCacheResult:
    """What is known of a setting so far; None where it has not been measured. `dtype` is that of 16 bits, `model_dtype`
    what the perplexity was computed in; `positions`: how many the model was made for. `merged`: the recorded cost of
    merging the model's heads to this many; `not_recorded` says why there is none, and is empty for its own heads."""

    params: KVCacheParams
    own_heads: int
    device: str
    dtype: str
    model_dtype: str
    positions: int
    sizes: Sizes
    merged: MergeStudy | None = None
    not_recorded: str = ""
    speed: Speed | None = None
    quality: Quality | None = None

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
