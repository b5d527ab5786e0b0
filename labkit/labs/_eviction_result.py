"""What `eviction_lab` finds out: its parameters; which tokens a cache kept, its bytes, and what it still knows."""

from __future__ import annotations

from dataclasses import dataclass

from labkit import _check
from labkit.kv_cache.eviction import EVICTION_METHODS
from labkit.labs import _eviction_forms as forms
from labkit.labs._result import Number
from labkit.measure import Measurement

FULL = "full"
METHODS = EVICTION_METHODS
BUDGETS = (1.0, 0.5, 0.25, 0.125, 0.0625)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class EvictionParams:
    """One setting of the lab. budget: share of the tokens that the cache may hold; "full" holds all whatever it is.
    depth: of the needle in the prompt that is shown, 0 at its start."""

    method: str
    budget: float
    depth: float = DEPTHS[0]
    model: str = "smollm2-135m"

    def __post_init__(self) -> None:
        _check.choice("method", self.method, METHODS)
        _check.choice("budget", self.budget, BUDGETS)
        _check.choice("depth", self.depth, DEPTHS)

    @property
    def held(self) -> float:
        """The budget, or 1 for a method that has none."""
        return 1.0 if self.method == FULL else self.budget


@dataclass(frozen=True)
class Span:
    """Tokens from `start` up to, not including, `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Kept:
    """One prompt's cache as the question's last word is about to go in.

    heads: by layer, for each token of the prompt how many of the `num_key_value_heads` hold it. tokens: their texts.
    needle: the fact's place, digits: its number's within, question: the end. held: tokens a KV head. nbytes: counted
    from the cache's tensors; predicted: by its formula; full_bytes: all tokens', by theirs; kv_bytes: what keys and
    values of `held` tokens take, the rest being bookkeeping. answer, said: what the fact says, and what the model says
    when it reads this cache; found: whether those are the same tokens.
    """

    heads: tuple[tuple[int, ...], ...]
    tokens: tuple[str, ...]
    num_key_value_heads: int
    needle: Span
    digits: Span
    question: Span
    held: int
    nbytes: int
    predicted: int
    full_bytes: int
    kv_bytes: int
    answer: str
    said: str
    found: bool

    @property
    def ratio(self) -> float:
        """Of the bytes of all tokens."""
        return self.nbytes / self.full_bytes

    @property
    def bookkeeping(self) -> int:
        """Bytes beside the keys and values of the tokens held."""
        return self.nbytes - self.kv_bytes

    def share(self, span: Span) -> float:
        """How much of these tokens is held, over all layers and KV heads."""
        held = sum(sum(layer[span.start : span.end]) for layer in self.heads)
        return held / (len(self.heads) * self.num_key_value_heads * len(span))


@dataclass(frozen=True)
class Needles:
    """Of the first prompts of `of`, whether the model said each one's number."""

    found: tuple[bool, ...]
    of: int

    @property
    def count(self) -> int:
        return sum(self.found)

    @property
    def tried(self) -> int:
        return len(self.found)

    @property
    def firm(self) -> bool:
        return self.tried == self.of


@dataclass(frozen=True)
class Quality:
    """Perplexity of the model that reads its past out of this cache, and out of one of all tokens, over the same first
    `scored` of `of` tokens. prompt_length: tokens of each window that went in at once and are not scored."""

    perplexity: float
    baseline: float
    scored: int
    of: int
    context_length: int
    prompt_length: int = 0

    @property
    def firm(self) -> bool:
        return self.scored == self.of

    @property
    def ratio(self) -> float:
        return self.perplexity / self.baseline


@dataclass(frozen=True)
class EvictionResult:
    """What is known of a setting so far; None where it has not been measured. `full_needles`: with all tokens."""

    params: EvictionParams
    device: str
    dtype: str
    kept: Kept
    depths: tuple[float, ...]
    needles: Needles | None = None
    full_needles: Needles | None = None
    quality: Quality | None = None

    def numbers(self) -> list[Number]:
        return forms.numbers(self)

    def text(self) -> str:
        return forms.text(self)

    def rows(self) -> list[dict[str, object]]:
        return forms.rows(self)

    def measurements(self) -> list[Measurement]:
        return forms.measurements(self)
