"""Prompt lookup: draft what came after the same tokens before, with no model at all.

Prompt lookup decoding (Saxena, 2023); LLMA (Yang et al., 2023, Inference with Reference, section 3) copies spans of
reference texts in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.speculative.interface import Proposal, Sampling

if TYPE_CHECKING:
    from labkit.engine.decode import Decoder

# The most tokens drafted after a match of so many tokens; longer matches draft as many as are asked for. One token in
# common says little: on the held-out prompts of data/prompts.yaml 29% of the first tokens that follow one were right
# where the answer copies and 11% where it repeats nothing, against 80% and more after three.
_MOST_AFTER = {1: 1}
# Every size is looked for at every token; a longer run of tokens that repeats is found by its end as well.
_LONGEST = 64


class _NgramIndex:
    """Where each n-gram of a row first ended, kept up as the row grows: a look-up costs the same at any length."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._known = 0
        self._after: dict[tuple[int, ...], int] = {}

    def _keep_up(self, row: list[int]) -> None:
        # Not those that end the row: nothing follows them yet, and the suffix would find itself.
        for end in range(self._known + 1, len(row)):
            for size in self._sizes:
                if size <= end:
                    self._after.setdefault(tuple(row[end - size : end]), end)
        self._known = max(self._known, len(row) - 1)

    def continuation(self, row: list[int], n: int) -> list[int]:
        """At most `n` tokens of `row` that followed the longest suffix which stood there before; [] for none."""
        self._keep_up(row)
        for size in self._sizes:
            start = self._after.get(tuple(row[-size:])) if size < len(row) else None
            if start is not None:
                return row[start : start + min(n, _MOST_AFTER.get(size, n))]
        return []


class PromptLookup:
    """Looks for the last `max_ngram` verified tokens earlier in the row, then for fewer, down to `min_ngram`, and
    drafts what followed them, up to the end of what is known; nothing where nothing is found.

    Among several matches the first counts: on the held-out prompts, in bfloat16 with γ = 8, it gives 4.2 tokens a
    target call where the answer copies, the latest gives 4.1. After a match of one token it drafts one, whatever γ
    is, so that little is lost where the answer repeats nothing.

    The rows of a batch look each in itself. All draft as many tokens as the row with the longest find: shorter ones
    are filled up with their own last token, which costs nothing but the rejection. A row that is finished is looked up
    like any other, since only the loop knows.

    Errors: ValueError for sizes out of range.
    """

    wants_hidden = False

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        self.max_ngram = _check.integer("max_ngram", max_ngram, 1, _LONGEST)
        self.min_ngram = _check.integer("min_ngram", min_ngram, 1, max_ngram)
        self._indices: list[_NgramIndex] = []
        self._device = torch.device("cpu")

    def begin(self, target: Decoder, input_ids: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        """Forget all rows, and start `input_ids (batch, prompt)`; how they are sampled does not matter here."""
        _check.tensor("input_ids", input_ids, ndim=2)
        self._indices = [_NgramIndex(self.min_ngram, self.max_ngram) for _ in range(len(input_ids))]
        self._device = target.device

    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        """At most `n` tokens after each of `rows`, chosen without chance. Errors: ValueError for other than the rows
        that `begin` was given."""
        count = len(self._indices)
        _check.require(len(rows) == count, "rows", f"{len(rows)} rows", f"{count}, as many as begin() was given")
        _check.integer("n", n, 1)
        found = [index.continuation(row, n) for index, row in zip(self._indices, rows, strict=True)]
        longest = max(map(len, found))
        padded = [tokens + [row[-1]] * (longest - len(tokens)) for tokens, row in zip(found, rows, strict=True)]
        return Proposal(torch.tensor(padded, dtype=torch.int64, device=self._device).reshape(count, longest))

    def observe(self, hidden: torch.Tensor, kept: list[int]) -> None:
        """Not called: `wants_hidden` is False."""
