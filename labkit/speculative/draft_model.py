"""A smaller model drafts, token by token (Leviathan et al., 2023, algorithm 1; Chen et al., 2023, algorithm 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from labkit import _check
from labkit.engine.decode import Decoder
from labkit.engine.sampling import most_likely
from labkit.models import LoadedModel
from labkit.speculative.interface import Proposal, Sampling
from labkit.speculative.tokenizers import check_same_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class DraftModel:
    """Drafts with `draft`, a causal LM or a Decoder over one, token by token, from a KV cache of its own.

    The draft may have another dtype, another size or another device than the target; ids of its vocabulary that the
    target does not have are never drafted, and ids that it lacks itself have q = 0. It samples with the target's
    temperature, top_k and top_p; greedily, the drafts are its most likely tokens.

    tokenizer: the draft's; a LoadedModel brings its own. target_tokenizer: the target's. Where both are known they
    are compared token by token (`check_same_tokenizer`), and the vocabularies of the two models may be padded to
    different sizes. Where one is unknown nothing but those sizes can be compared, and they must be equal: that two
    models of the same size give their ids the same meaning is then up to the caller.

    Where the draft's own positions end, it stops drafting and the target goes on alone.
    Errors: ValueError for a model that a Decoder refuses, for different tokenizers with the first difference, and for
    vocabulary sizes that differ.
    """

    wants_hidden = False

    def __init__(
        self,
        draft: LoadedModel | PreTrainedModel | Decoder,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.decoder = draft if isinstance(draft, Decoder) else Decoder(draft)
        if tokenizer is None and isinstance(draft, LoadedModel):
            tokenizer = draft.tokenizer
        self._same_tokenizer = tokenizer is not None and target_tokenizer is not None
        if self._same_tokenizer:
            check_same_tokenizer(tokenizer, target_tokenizer)
        # What each row of the draft's cache was fed.
        self._fed: list[list[int]] = []

    def begin(self, target: Decoder, input_ids: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        """Start after `input_ids (batch, prompt)`: an empty cache; the prompt is read by the first proposal."""
        _check.tensor("input_ids", input_ids, ndim=2)
        _check.require(target is not self.decoder, "target", "the Decoder that drafts", "another one: each has a cache")
        own, vocab = self.decoder.model.config.vocab_size, target.model.config.vocab_size
        takes = f"{vocab}, as the target has, or both tokenizers, to see that they are the same"
        _check.require(own == vocab or self._same_tokenizer, "draft", f"a vocabulary of {own}", takes)
        self._vocab, self._device = vocab, target.device
        self._sampling, self._generator = sampling, generator
        self.decoder.reset()
        self._fed = [[] for _ in range(len(input_ids))]

    @torch.inference_mode()
    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        """At most `n` tokens after each of `rows`; fewer, or none, where the draft's positions end."""
        _check.integer("n", n, 1)
        count = len(self._fed)
        _check.require(len(rows) == count, "rows", f"{len(rows)} rows", f"{count}, as many as begin() was given")
        # The last drafted token is not fed, so that one more would fit.
        k = min(n, self.decoder.model.config.max_position_embeddings - max(map(len, rows)) + 1)
        if k < 1:
            return Proposal(torch.zeros(count, 0, dtype=torch.int64, device=self._device))
        logits = self._catch_up(rows)
        tokens, probs = [], []
        for step in range(k):
            token, q = self._choose(logits)
            tokens.append(token)
            probs.append(q)
            if step < k - 1:
                logits = self.decoder.forward(token[:, None])[:, -1]
        drafted = torch.stack(tokens, dim=1)
        for fed, row in zip(self._fed, drafted[:, : k - 1].tolist(), strict=True):
            fed.extend(row)
        return Proposal(drafted, None if self._sampling.greedy else torch.stack(probs, dim=1))

    def observe(self, hidden: torch.Tensor, kept: list[int]) -> None:
        """Not called: `wants_hidden` is False."""

    def _catch_up(self, rows: list[list[int]]) -> torch.Tensor:
        """Logits `(batch, vocab)` after each row: forget what was refused, and read what is new.

        After a draft that was accepted whole two tokens are new, otherwise one; a row that is finished has none. All
        rows are fed as many as the one with the most: the others hold theirs already and are cropped a little further.
        """
        new = max(len(row) - _common(fed, row) for fed, row in zip(self._fed, rows, strict=True))
        shortest = min(map(len, rows))
        takes = "rows that go on from those of begin()"
        _check.require(new <= shortest, "rows", f"a row of {shortest} tokens beside {new} new ones", takes)
        starts = [len(row) - new for row in rows]
        if self.decoder.length:
            self.decoder.crop(starts)
        tokens = torch.tensor([row[start:] for row, start in zip(rows, starts, strict=True)])
        self._fed = [list(row) for row in rows]
        return self.decoder.forward(tokens, logits_to_keep=1)[:, -1]

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One token a row, `(batch,)`, on the target's device, and q `(batch, vocab)` if it was drawn by chance."""
        logits = logits[:, : self._vocab].to(self._device)
        if self._sampling.greedy:
            return most_likely(logits), None
        q = self._sampling.probabilities(logits)
        q = F.pad(q, (0, self._vocab - q.shape[-1]))
        return torch.multinomial(q, 1, generator=self._generator).squeeze(1), q


def _common(fed: list[int], row: list[int]) -> int:
    """How many tokens of `row` were fed already, its last one left out, since a step needs a token to read."""
    most = min(len(fed), len(row) - 1)
    if fed[:most] == row[:most]:
        return most
    return next(place for place in range(most) if fed[place] != row[place])
