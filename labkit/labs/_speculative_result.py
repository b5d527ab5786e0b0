"""What `speculative_lab` finds out: its parameters; the generation call by call, its speed, and what a call costs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from labkit import _check
from labkit.labs import _speculative_forms as forms
from labkit.labs._result import Number
from labkit.labs._speculative_tokens import Token, draft_lengths
from labkit.measure import Measurement, Timing
from labkit.speculative.costs import SpeculationCosts
from labkit.speculative.stats import Call, SpeculativeStats
from labkit.speculative.theory import expected_tokens

EAGLE, LOOKUP, ITSELF = PROPOSERS = ("EAGLE head", "prompt lookup", "int4 copy")
PROMPTS = ("chat", "copy_heavy", "no_repeats")
SHAPES = ("chain", "tree")
MOST_DRAFTED, HOTTEST = 8, 1.5
PACKED = "int4"


@dataclass(frozen=True)
class SpeculativeParams:
    """One setting of the lab. `weights` are the target's: "int4", or the dtype that the model was loaded in. `shape` of
    the draft is a tree only where the head drafts."""

    num_assistant_tokens: int
    temperature: float
    proposer: str
    prompt: str = "chat"
    weights: str = PACKED
    shape: str = "chain"
    max_new_tokens: int = 64
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        _check.integer("num_assistant_tokens", self.num_assistant_tokens, 0, MOST_DRAFTED)
        _check.number("temperature", self.temperature, 0.0, HOTTEST)
        _check.choice("proposer", self.proposer, PROPOSERS)
        _check.choice("prompt", self.prompt, PROMPTS)
        _check.choice("shape", self.shape, SHAPES)
        takes = f"chain with {self.proposer}: only the {EAGLE} drafts a tree"
        _check.require(self.shape == "chain" or self.proposer == EAGLE, "shape", self.shape, takes)
        _check.integer("max_new_tokens", self.max_new_tokens, 1)

    @property
    def tree(self) -> bool:
        return self.shape == "tree"

    @property
    def same_but_length(self) -> tuple[object, ...]:
        """All but the draft's length: settings that one curve holds for."""
        return (self.proposer, self.temperature, self.prompt, self.weights, self.shape, self.model)


@dataclass(frozen=True)
class Round:
    """One plain and one speculative generation, in turn: seconds a token, after the first of each."""

    plain_s: float
    speculative_s: float


@dataclass(frozen=True)
class SpeculativeResult:
    """What is known of a setting so far. calls and tokens: of the generation that was shown. stats: sums over all of
    them. costs: of a call, by draft length. threads: of the CPU that everything ran with, None on a GPU."""

    params: SpeculativeParams
    device: str
    dtype: str
    prompt_text: str
    prompt_tokens: int
    threads: int | None = None
    calls: tuple[Call, ...] = ()
    tokens: tuple[Token, ...] = ()
    stats: SpeculativeStats = SpeculativeStats()
    rounds: tuple[Round, ...] = ()
    costs: Mapping[int, SpeculationCosts] = field(default_factory=dict)

    @property
    def alpha(self) -> float | None:
        """Kept of the drafted tokens that were tested; None where none was."""
        return self.stats.acceptance_rate if self.stats.n_tested else None

    @property
    def tokens_a_call(self) -> float | None:
        return self.stats.tokens_per_target_call if self.stats.n_row_calls else None

    @cached_property
    def lengths(self) -> list[int]:
        """Drafted tokens of each call that was shown and had room for all."""
        return draft_lengths(self.calls, self.params.num_assistant_tokens, self.params.max_new_tokens)

    @property
    def drafted(self) -> float | None:
        """Drafted tokens a call, of a tree all its nodes."""
        return statistics.mean(self.lengths) if self.lengths else None

    @property
    def share(self) -> float:
        """Of the calls, those that had a draft at all."""
        return sum(map(bool, self.lengths)) / len(self.lengths) if self.lengths else 1.0

    def depths(self, gamma: int) -> list[int]:
        """How deep each call would draft with `gamma` allowed: as deep as it did where it stopped before, as deep as
        it may where it did not."""
        asked = self.params.num_assistant_tokens
        return [gamma if length >= asked else min(length, gamma) for length in self.lengths] or [gamma]

    def formula(self, gamma: int | None = None) -> float | None:
        """(1 - α^(γ+1)) / (1 - α), in each call with as many tokens as it drafts: MODELLED tokens a call."""
        gamma = self.params.num_assistant_tokens if gamma is None else gamma
        if gamma == 0:
            return 1.0
        if self.alpha is None:
            return None
        return statistics.mean(expected_tokens(self.alpha, depth) for depth in self.depths(gamma))

    def model(self, gamma: int | None = None) -> float | None:
        """E / (γc + v), with the measured α, c and v: MODELLED speed-up. None while a cost is not measured."""
        gamma = self.params.num_assistant_tokens if gamma is None else gamma
        tokens, costs = self.formula(gamma), self.costs.get(gamma)
        if gamma == 0 or tokens is None:
            return tokens
        return tokens / (gamma * costs.draft_cost + self.verify_cost(gamma)) if costs else None

    def verify_cost(self, gamma: int) -> float:
        """v, the mean over calls that verify as many tokens as each drafts; one that drafts none is a plain step."""
        costs = [self.costs.get(depth, self.costs[gamma]) if depth else None for depth in self.depths(gamma)]
        return statistics.mean(cost.verify_cost if cost else 1.0 for cost in costs)

    @property
    def folk(self) -> float | None:
        """1 / (1 - α), which is said to be the speed-up; infinite where nothing was refused."""
        if self.alpha is None:
            return None
        return 1 / (1 - self.alpha) if self.alpha < 1 else float("inf")

    @property
    def plain(self) -> Timing | None:
        """Seconds a token of plain decoding."""
        return Timing.of([r.plain_s for r in self.rounds]) if self.rounds else None

    @property
    def speculative(self) -> Timing | None:
        """Seconds a token with the draft."""
        return Timing.of([r.speculative_s for r in self.rounds]) if self.rounds else None

    @property
    def speedups(self) -> list[float]:
        """Of each round, lowest first."""
        return sorted(r.plain_s / r.speculative_s for r in self.rounds)

    @property
    def speedup(self) -> float | None:
        """Median over the rounds; below 1 it is slower."""
        return statistics.median(self.speedups) if self.rounds else None

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
