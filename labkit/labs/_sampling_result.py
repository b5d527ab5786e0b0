"""What `sampling_lab` finds out: its parameters; the next token's distribution, texts, what is accepted of a draft."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from labkit import _check
from labkit.labs import _sampling_forms as forms
from labkit.labs._result import Number
from labkit.labs._speculative_result import EAGLE, PACKED, PROPOSERS
from labkit.measure import Measurement
from labkit.speculative.interface import Sampling
from labkit.speculative.stats import SpeculativeStats

# Texts drawn at a setting, from as many seeds; tokens drafted a call.
TEXTS, DRAFTED = 3, 3
HOTTEST, MOST_KEPT, LEAST_P = 2.0, 100, 0.1
FILTERS = ("top_k", "top_p")


@dataclass(frozen=True)
class SamplingParams:
    """One setting of the lab. top_k 0 and top_p 1 are off. `prompt`: which of the chat prompts; `seed`: of the first
    text, the others have the next ones. `weights` are the target's: "int4", or the dtype it was loaded in."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    prompt: int = 0
    seed: int = 0
    weights: str = PACKED
    proposer: str = EAGLE
    max_new_tokens: int = 40
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        _check.number("temperature", self.temperature, 0.0, HOTTEST)
        _check.integer("top_k", self.top_k, 0, MOST_KEPT)
        _check.number("top_p", self.top_p, LEAST_P, 1.0)
        _check.integer("prompt", self.prompt, 0)
        _check.integer("seed", self.seed, 0)
        _check.choice("proposer", self.proposer, PROPOSERS)
        _check.integer("max_new_tokens", self.max_new_tokens, 2)

    @property
    def sampling(self) -> Sampling:
        """As generation takes it."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def cuts(self) -> bool:
        """Whether top_k or top_p is on."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def same_but_temperature(self) -> tuple[object, ...]:
        """Settings that one curve over temperature holds for."""
        return (self.top_k, self.top_p, self.prompt, self.seed, self.weights, self.proposer, self.model)


@dataclass(frozen=True)
class Likely:
    """One token and its probability: `own` in the model's own distribution (temperature 1, nothing cut), `uncut` at
    this temperature with nothing cut, `drawn` as it is drawn. `cut`: what leaves it out, "top_k" or "top_p",
    "temperature" where that alone makes it 0, "" where nothing does."""

    text: str
    own: float
    uncut: float
    drawn: float
    cut: str = ""


@dataclass(frozen=True)
class NextToken:
    """The distribution of the token after the prompt. likeliest: first ones of the vocabulary, the likeliest first;
    others: all the rest as one. kept: tokens with a probability above 0. bits, own_bits: entropy, as drawn and of the
    model's own distribution. cut_by_top_k, cut_by_top_p: probability at this temperature that each takes away."""

    likeliest: tuple[Likely, ...]
    others: Likely
    vocab_size: int
    kept: int
    bits: float
    own_bits: float
    cut_by_top_k: float
    cut_by_top_p: float

    @property
    def mass_cut(self) -> float:
        return self.cut_by_top_k + self.cut_by_top_p


@dataclass(frozen=True)
class SampledText:
    """A text as far as it has come. likeliest: of each token, whether the model held it the likeliest there. chances:
    of each drafted token that was tested, sum min(p, q): how probable it was that one drawn from q is accepted."""

    seed: int
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    likeliest: tuple[bool, ...] = ()
    chances: tuple[float, ...] = ()
    stats: SpeculativeStats | None = None


@dataclass(frozen=True)
class SamplingResult:
    """What is known of a setting so far. threads: of the CPU that everything ran with, None on a GPU."""

    params: SamplingParams
    device: str
    dtype: str
    prompt_text: str
    prompt_tokens: int
    next_token: NextToken
    texts: tuple[SampledText, ...] = ()
    threads: int | None = None

    @property
    def whole(self) -> bool:
        """Whether all texts have come to their end."""
        return len(self.texts) == TEXTS and all(text.stats is not None for text in self.texts)

    @property
    def different_texts(self) -> int | None:
        """How many of the texts differ; None while they are being drawn."""
        return len({text.tokens for text in self.texts}) if self.whole else None

    @property
    def distinct_share(self) -> float | None:
        """Different tokens over all tokens of all texts."""
        tokens = [token for text in self.texts for token in text.tokens]
        return len(set(tokens)) / len(tokens) if self.whole else None

    @property
    def likeliest_share(self) -> float | None:
        """Of all tokens, those that the model held the likeliest where they stand."""
        found = [one for text in self.texts for one in text.likeliest]
        return sum(found) / len(found) if self.whole else None

    @property
    def alike(self) -> int | None:
        """How many tokens all texts begin with in common."""
        if not self.whole:
            return None
        steps = zip(*(text.tokens for text in self.texts), strict=False)
        common = [len(set(step)) == 1 for step in steps]
        return common.index(False) if False in common else len(common)

    @property
    def stats(self) -> SpeculativeStats:
        """Sums over the texts that have come to their end."""
        return sum((text.stats for text in self.texts if text.stats), SpeculativeStats())

    @property
    def alpha(self) -> float | None:
        """Kept of the drafted tokens that were tested; None where none was, or while texts are being drawn."""
        return self.stats.acceptance_rate if self.whole and self.stats.n_tested else None

    @property
    def alpha_error(self) -> float | None:
        """Standard error of a share of so many; texts that are alike tell as much as one."""
        if self.alpha is None:
            return None
        tested = sum(stats.n_tested for stats in {text.tokens: text.stats for text in self.texts}.values())
        return math.sqrt(self.alpha * (1 - self.alpha) / tested)

    @property
    def expected_alpha(self) -> float | None:
        """sum min(p, q), the mean over the tested places (Leviathan et al., 2023, theorem 3.5 and corollary 3.6)."""
        chances = [chance for text in self.texts for chance in text.chances]
        return statistics.fmean(chances) if self.whole and chances else None

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
