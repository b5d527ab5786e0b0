"""What `stack_lab` finds out: its parameters, and a set of rungs beside the baseline, as far as it is known."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import geometric_mean

from labkit import _check
from labkit.engine.ladder import POPULAR, RUNGS, PopularRung
from labkit.engine.ladder.rungs import check_rungs, effective
from labkit.labs import _stack_forms as forms
from labkit.labs._result import Number
from labkit.measure import Measurement, Timing
from labkit.speculative.stats import SpeculativeStats

PROMPTS = ("chat", "long")
MOST_DRAFTED = 6


@dataclass(frozen=True)
class StackParams:
    """One setting of the lab. rungs: those that are asked for, whether they go together or not; they are put on in the
    ladder's order. num_assistant_tokens counts where speculation is on."""

    rungs: tuple[str, ...]
    prompt: str = "chat"
    num_assistant_tokens: int = 2
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        asked = check_rungs("rungs", self.rungs)
        object.__setattr__(self, "rungs", tuple(rung for rung in RUNGS if rung in asked))
        _check.choice("prompt", self.prompt, PROMPTS)
        _check.integer("num_assistant_tokens", self.num_assistant_tokens, 1, MOST_DRAFTED)


@dataclass(frozen=True)
class Run:
    """One generation: seconds to the first token, and a token after it."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Turn:
    """The baseline and the set, one after the other."""

    baseline: Run
    stack: Run


@dataclass(frozen=True)
class Sizes:
    """Bytes: of all weights, of one token's keys and values, and what a step in the middle of a generation reads at
    least; peak_bytes: weights and all that a generation takes on top, 0 where it is not known yet."""

    weight_bytes: int
    kv_bytes: float
    step_bytes: int
    peak_bytes: int = 0

    @property
    def rest_bytes(self) -> int:
        """At the peak, beside the weights."""
        return max(0, self.peak_bytes - self.weight_bytes)


@dataclass(frozen=True)
class Quality:
    """Perplexities of the same windows by the set and by the baseline; of `context_length` tokens each."""

    stack: tuple[float, ...]
    baseline: tuple[float, ...]
    context_length: int
    of_windows: int

    @property
    def perplexity(self) -> float:
        """Over all windows: each scores as many tokens."""
        return geometric_mean(self.stack)

    @property
    def base(self) -> float:
        """The baseline's."""
        return geometric_mean(self.baseline)

    @property
    def loss(self) -> float:
        """Over the baseline's, less 1."""
        return self.perplexity / self.base - 1


@dataclass(frozen=True)
class Recorded:
    """The same set in a ladder of an earlier run: times the baseline of that run, and where and when it ran."""

    speedup: float
    where: str


@dataclass(frozen=True)
class StackResult:
    """What is known of a setting so far; None, 0 or empty where it was not measured yet.

    on: the rungs that go together; left_out: those asked for that do not, with the reason. first: the set's own short
    generation, beside kept, the baseline's of this prompt from when it was first measured. stats: what speculation
    counted. bandwidth: the measured ceiling in bytes/s. threads: of the CPU, None on a GPU.
    """

    params: StackParams
    device: str
    dtype: str
    on: tuple[str, ...]
    left_out: Mapping[str, str]
    prompt_tokens: int
    baseline_name: str
    sizes: Sizes
    base_sizes: Sizes
    proposer: str = ""
    threads: int | None = None
    kept: Run | None = None
    first: Run | None = None
    turns: tuple[Turn, ...] = ()
    stats: SpeculativeStats = SpeculativeStats()
    bandwidth: float = 0.0
    quality: Quality | None = None
    recorded: Recorded | None = None

    @property
    def effective(self) -> tuple[str, ...]:
        """The rungs that change something: INT4 takes INT8's place."""
        return effective(self.on)

    @property
    def idle(self) -> dict[str, str]:
        """Why each rung that was asked for changes nothing: it was left out, or another one takes its place."""
        replaced = {rung: "INT4 takes its place" for rung in self.on if rung not in self.effective}
        return dict(self.left_out) | replaced

    @property
    def gamma(self) -> int:
        """Drafted a call; 0 without speculation."""
        return self.params.num_assistant_tokens if "speculation" in self.on else 0

    @property
    def key(self) -> tuple[object, ...]:
        """Settings that run the same thing have the same."""
        return (self.effective, self.gamma, self.params.prompt, self.params.model)

    @property
    def stack(self) -> Timing | None:
        """Seconds a token of the set."""
        runs = [turn.stack for turn in self.turns] or [run for run in (self.first,) if run]
        return Timing.of([run.tpot_s for run in runs]) if runs else None

    @property
    def baseline(self) -> Timing | None:
        """Seconds a token of the baseline."""
        runs = [turn.baseline for turn in self.turns] or [run for run in (self.kept,) if run]
        return Timing.of([run.tpot_s for run in runs]) if runs else None

    @property
    def ttft(self) -> tuple[float, float] | None:
        """Seconds to the first token: of the set, of the baseline."""
        if self.turns:
            both = [(turn.stack.ttft_s, turn.baseline.ttft_s) for turn in self.turns]
            return tuple(statistics.median(side) for side in zip(*both, strict=True))
        return (self.first.ttft_s, self.kept.ttft_s) if self.first and self.kept else None

    @property
    def speedups(self) -> list[float]:
        """Of each turn, lowest first; before there is one, of the first generations."""
        if self.turns:
            return sorted(turn.baseline.tpot_s / turn.stack.tpot_s for turn in self.turns)
        return [self.kept.tpot_s / self.first.tpot_s] if self.first and self.kept else []

    @property
    def speedup(self) -> float | None:
        """Times the baseline's tokens a second; the median over the turns."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def tokens_per_call(self) -> float:
        """Verified in one pass of the target; 1 without speculation."""
        return self.stats.tokens_per_target_call if self.stats.n_row_calls else 1.0

    @property
    def acceptance(self) -> float | None:
        """Kept of the drafted tokens that were tested."""
        return self.stats.acceptance_rate if self.stats.n_tested else None

    @property
    def ceiling(self) -> float | None:
        """Tokens a second if reading a step's bytes took all the time; drafting not counted."""
        return self.tokens_per_call * self.bandwidth / self.sizes.step_bytes if self.bandwidth else None

    @property
    def popular(self) -> PopularRung | None:
        """The rung of the popular ladder that this set is, INT4 counting for INT8 as well; None where it is none."""
        passed = [p for p in POPULAR if not p.rung or p.rung in self.on or (p.rung == "int8" and "int4" in self.on)]
        if passed != list(POPULAR[: len(passed)]) or ("quantized_kv" in self.on and "attention" not in self.on):
            return None
        # Nobody names the baseline: a set with none of the popular rungs is it only where it is ours.
        return None if len(passed) == 1 and self.on else passed[-1]

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
