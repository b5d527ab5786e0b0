"""What the loop and a proposer know of each other. `labkit.speculative.decode` loops; any object with these methods
drafts for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from labkit import _check
from labkit.engine.sampling import check_sampling, probabilities

if TYPE_CHECKING:
    from labkit.engine.decode import Decoder
    from labkit.speculative.tree import DraftTree


@dataclass(frozen=True)
class Sampling:
    """How the target is sampled: temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The distribution `(..., vocab)`, float32, that a token is drawn from."""
        return probabilities(logits, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Proposal:
    """Drafted `tokens (batch, k)`, int64; k may be 0.

    probs: q `(batch, k, vocab)`, float32, over the target's vocabulary, that each token was drawn from; None where it
    was chosen without chance, which makes q all on that token. tree: None for a chain; with one, k is its length and
    no token was drawn by chance.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None = None
    tree: DraftTree | None = None


class Proposer(Protocol):
    """Drafts tokens that the target then verifies. It may be wrong: the output is the target's all the same."""

    wants_hidden: bool

    def begin(self, target: Decoder, input_ids: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        """A new generation after `input_ids (batch, prompt)`. Errors: ValueError for what does not go together."""

    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        """Draft at most `n` tokens (n >= 1; a tree: n deep) after `rows`, the prompt and verified tokens of each."""

    def observe(self, hidden: torch.Tensor, kept: list[int]) -> None:
        """Where `wants_hidden`: the target's hidden states `(batch, q_len, hidden_size)`, after the final norm, of the
        tokens it was just fed; of row b the first `kept[b]` are verified. A tree's come in the order of the path."""


def check_proposer(proposer: object) -> None:
    """Refuse what lacks a method that the loop calls; `observe` only has to be there where it wants hidden states."""
    needed = ["begin", "propose", *(["observe"] if getattr(proposer, "wants_hidden", None) else [])]
    drafts = hasattr(proposer, "wants_hidden") and all(callable(getattr(proposer, name, None)) for name in needed)
    got = f"the class {proposer.__name__}" if isinstance(proposer, type) else type(proposer).__name__
    takes = "a proposer, such as a DraftModel, PromptLookup() or EagleHead.load()"
    _check.require(drafts and not isinstance(proposer, type), "proposer", got, takes)
