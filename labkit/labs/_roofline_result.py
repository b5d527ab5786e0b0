"""What `roofline_lab` finds out: its parameters, and each op of a decode step and a prefill beside its ceiling."""

from dataclasses import dataclass, replace

from labkit import _check
from labkit.hardware import Ceilings, Datasheet
from labkit.labs import _roofline_forms as forms
from labkit.labs._result import Number
from labkit.measure import Measurement, Timing
from labkit.roofline import OpCost, ridge, time_floor

# Ops that a learner thinks of as one thing share a colour; the names are those of `op_costs`.
FAMILIES = {
    "MLP": ("gate_proj", "up_proj", "down_proj"),
    "projections": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "LM head": ("lm_head",),
    "attention": ("attention",),
    "elementwise": (
        *("embed", "input_norm", "rope", "kv_write", "attn_residual"),
        *("post_norm", "act_mul", "mlp_residual", "final_norm"),
    ),
}


@dataclass(frozen=True)
class RooflineParams:
    """One setting of the lab. `seq_len`: tokens that a decode step attends to, itself included; the prompt's length."""

    batch: int
    seq_len: int
    dtype: str
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        _check.integer("batch", self.batch, 1)
        _check.integer("seq_len", self.seq_len, 2)
        _check.dtype("dtype", self.dtype)


@dataclass(frozen=True)
class OpPoint:
    """One op of a step, over all layers: what it costs (MODELLED), what it took (MEASURED), the least it could take."""

    cost: OpCost
    seconds: Timing
    floor_s: float

    @property
    def achieved_flops(self) -> float:
        """FLOP/s."""
        return self.cost.flops / self.seconds.median

    @property
    def fraction(self) -> float:
        """Share of its ceiling reached; above 1 where a cache served what the roof takes from memory."""
        return self.floor_s / self.seconds.median


@dataclass(frozen=True)
class PhaseResult:
    """A decode step or a prefill: `batch` sequences of `q_len` new tokens, each attending to `kv_len`.

    `step` times the whole step, without a clock between its ops. `uncut`: of a prompt that was cut because it would
    run too long, what the whole of it costs.
    """

    name: str
    batch: int
    q_len: int
    kv_len: int
    step: Timing
    ops: tuple[OpPoint, ...]
    uncut: tuple[OpCost, ...] = ()

    def total(self, field: str) -> int:
        """Sum over the ops of what OpCost calls `field`: flops, bytes, weight_bytes, kv_bytes, activation_bytes."""
        return sum(getattr(op.cost, field) for op in self.ops)

    def under(self, ceilings: Ceilings, dtype: str) -> "PhaseResult":
        """The same times under another roof."""
        ops = tuple(replace(op, floor_s=time_floor(op.cost, ceilings, dtype)) for op in self.ops)
        return replace(self, ops=ops)

    def op(self, name: str) -> OpPoint:
        """The op of that name."""
        return next(op for op in self.ops if op.cost.name == name)

    def family(self, name: str) -> tuple[OpPoint, ...]:
        """The ops of a family."""
        return tuple(op for op in self.ops if op.cost.name in FAMILIES[name])

    @property
    def intensity(self) -> float:
        """FLOPs a byte of the whole step."""
        return self.total("flops") / self.total("bytes")

    @property
    def achieved_flops(self) -> float:
        """FLOP/s of the whole step."""
        return self.total("flops") / self.step.median

    @property
    def bandwidth(self) -> float:
        """Bytes that the step has to move over the time it took, bytes/s."""
        return self.total("bytes") / self.step.median

    @property
    def floor_s(self) -> float:
        """Seconds that the roof allows, op after op."""
        return sum(op.floor_s for op in self.ops)

    @property
    def fraction(self) -> float:
        """Share of the roof reached by the whole step."""
        return self.floor_s / self.step.median

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences over the step's time."""
        return self.batch * self.q_len / self.step.median


@dataclass(frozen=True)
class RooflineResult:
    """Both phases under the ceilings of `device`; `prefill` is None until it has been measured."""

    params: RooflineParams
    device: str
    ceilings: Ceilings
    sheet: Datasheet | None
    decode: PhaseResult
    prefill: PhaseResult | None = None

    @property
    def phases(self) -> tuple[PhaseResult, ...]:
        """What has been measured, decode first."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def peak(self) -> float:
        """Measured matmul FLOP/s in this setting's dtype."""
        return self.ceilings.matmul_flops[_check.dtype("dtype", self.params.dtype)]

    @property
    def ridge(self) -> float:
        """FLOP/byte at which the two measured roofs meet."""
        return ridge(self.ceilings, self.params.dtype)

    def under(self, ceilings: Ceilings) -> "RooflineResult":
        """The same times under another roof."""
        decode, *prefill = (phase.under(ceilings, self.params.dtype) for phase in self.phases)
        return replace(self, ceilings=ceilings, decode=decode, prefill=prefill[0] if prefill else None)

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
