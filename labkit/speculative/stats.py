"""What a speculative generation counts, call by call."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Call:
    """What one verifying call did to one row.

    drafted: the draft's tokens (of a tree: all of them, in its order). n_accepted: how many of them were kept.
    emitted: the tokens that the row grew by: those kept, then the target's own, which is its "residual" after a
    rejection and its "bonus" where the whole draft was right. kind: which of the two, or "cut" where an end-of-text
    token or the length ended the row among the kept ones; "prompt" of the first token, which comes from the prompt's
    pass and has no draft.
    """

    row: int
    drafted: tuple[int, ...]
    n_accepted: int
    emitted: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class SpeculativeStats:
    """Sums over a generation; over the rows of a batch that were still running.

    n_drafted: tokens drafted. n_tested: those that a verdict was given on: the kept ones and the first refused of each
    draft; of a tree, its levels, which are kept or refused one by one. n_matches: those kept. n_target_calls: verifying
    passes of the target; the prompt's pass, which makes no token, is not one. n_row_calls: the same, a pass over
    several rows counted for each row still running. n_emitted: new tokens.
    """

    n_drafted: int = 0
    n_tested: int = 0
    n_matches: int = 0
    n_target_calls: int = 0
    n_row_calls: int = 0
    n_emitted: int = 0

    def __add__(self, other: SpeculativeStats) -> SpeculativeStats:
        """The sums over both."""
        return SpeculativeStats(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def acceptance_rate(self) -> float:
        """n_matches / n_tested: the α of the formula; NaN where nothing was tested."""
        return self.n_matches / self.n_tested if self.n_tested else float("nan")

    @property
    def tokens_per_target_call(self) -> float:
        """Tokens that a verifying call yields a row, the target's own included; NaN where there was no call."""
        return self.n_emitted / self.n_row_calls if self.n_row_calls else float("nan")
