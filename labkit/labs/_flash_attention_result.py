"""What `flash_attention_lab` finds out: its parameters; time and memory of each implementation, by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from labkit import _check
from labkit.attention.traffic import AttentionShape, attention_flops
from labkit.hardware import Ceilings
from labkit.labs import _flash_attention_forms as forms
from labkit.labs._flash_attention_costs import costs
from labkit.labs._result import Number
from labkit.measure import Measurement, Timing
from labkit.roofline import time_floor
from labkit.sizing import bits_per_element

HEAD_DIMS = (32, 64, 96, 128)
BLOCK_SIZES = (16, 32, 64, 128, 256)
KERNELS = ("tiled", "triton")


@dataclass(frozen=True)
class FlashAttentionParams:
    """One setting of the lab: prefill of `seq_len` tokens; tiles of `block_size` queries and as many keys for
    `kernel`, the course's own."""

    seq_len: int
    head_dim: int
    block_size: int
    causal: bool
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    dtype: str = "float32"
    kernel: str = "tiled"

    def __post_init__(self) -> None:
        for name in ("seq_len", "head_dim", "block_size", "num_attention_heads", "num_key_value_heads"):
            _check.integer(name, getattr(self, name), 1)
        shared, heads = self.num_key_value_heads, self.num_attention_heads
        _check.require(heads % shared == 0, "num_key_value_heads", shared, f"a number that divides {heads}")
        _check.require(isinstance(self.causal, bool), "causal", self.causal, "True or False")
        _check.dtype("dtype", self.dtype)
        _check.choice("kernel", self.kernel, KERNELS)

    @property
    def shape(self) -> AttentionShape:
        n = self.seq_len
        return AttentionShape(1, self.num_attention_heads, self.num_key_value_heads, n, n, self.head_dim, self.causal)

    @property
    def block_sizes(self) -> tuple[int, int]:
        return self.block_size, self.block_size

    @property
    def output_bytes(self) -> int:
        return self.shape.q_elements * bits_per_element("dtype", self.dtype) // 8

    def at(self, seq_len: int) -> FlashAttentionParams:
        """The same setting with another length."""
        return replace(self, seq_len=seq_len)

    def implementation(self, role: str) -> str:
        """The name under which `run_attention` knows it."""
        return {"standard": "standard", "native": "labkit torch"}.get(role, f"labkit {self.kernel}")


@dataclass(frozen=True)
class Found:
    """One implementation at one length. peak_bytes: the allocator's highest, above what q, k and v take; the output
    counts. `why_not`: why it was not run; `not_recorded`: why its memory was not. None: not measured, or not yet."""

    timing: Timing | None = None
    peak_bytes: int | None = None
    why_not: str = ""
    not_recorded: str = ""


@dataclass(frozen=True)
class FlashAttentionResult:
    """What is known of a setting so far. found: by role. curve: what was measured of each role by length, up to the
    chosen one. others: what else runs here, by name; absent: what does not, and why. difference: the largest between
    outputs of the course's own kernel and PyTorch's. ceilings: of this machine, None while they are not measured."""

    params: FlashAttentionParams
    device: str
    free_bytes: int
    found: Mapping[str, Found] = field(default_factory=dict)
    curve: Mapping[int, Mapping[str, Found]] = field(default_factory=dict)
    others: Mapping[str, Found] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    difference: float | None = None
    ceilings: Ceilings | None = None

    def of(self, role: str) -> Found:
        """What is known of this role at the chosen length."""
        return self.found.get(role, Found())

    def seconds(self, role: str, seq_len: int | None = None) -> float | None:
        """Median of one call, at the chosen length or another that was measured."""
        found = self.of(role) if seq_len in (None, self.params.seq_len) else self.curve.get(seq_len, {}).get(role)
        return found.timing.median if found and found.timing else None

    def peak(self, role: str, seq_len: int | None = None) -> int | None:
        """Bytes at the chosen length or another that was measured."""
        found = self.of(role) if seq_len in (None, self.params.seq_len) else self.curve.get(seq_len, {}).get(role)
        return found.peak_bytes if found else None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Those that anything was measured at, shortest first."""
        return tuple(sorted({*self.curve, self.params.seq_len}))

    def speedup(self, role: str, seq_len: int | None = None) -> float | None:
        """How many times faster than standard attention; below 1 it is slower."""
        mine, standard = self.seconds(role, seq_len), self.seconds("standard", seq_len)
        return standard / mine if mine and standard else None

    def compared(self, role: str) -> list[int]:
        """The lengths at which both this role and standard attention were timed."""
        return [n for n in self.lengths if self.speedup(role, n) is not None]

    def faster_from(self, role: str) -> int | None:
        """The shortest measured length from which on it is faster than standard attention at every one; None where it
        is slower at the longest."""
        crossover = None
        for n in reversed(self.compared(role)):
            if self.speedup(role, n) <= 1:
                break
            crossover = n
        return crossover

    def floor_s(self, role: str) -> float | None:
        """Seconds that the roof allows for what this role computes and moves."""
        return time_floor(costs(self.params, role), self.ceilings, self.params.dtype) if self.ceilings else None

    @property
    def needed_flops(self) -> int:
        """FLOPs of the products over the pairs that are seen."""
        return attention_flops(self.params.shape)

    def rate(self, role: str) -> float | None:
        """FLOP/s achieved; of the pairs that are seen, whoever computes more of them."""
        seconds = self.seconds(role)
        return self.needed_flops / seconds if seconds else None

    def attainable(self, role: str) -> float | None:
        """FLOP/s of those pairs that the roof allows to this role."""
        floor = self.floor_s(role)
        return self.needed_flops / floor if floor else None

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
