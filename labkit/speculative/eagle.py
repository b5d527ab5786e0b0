"""`EagleHead`: drafts with one layer from the target's own hidden states, as a chain or as a static tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from labkit import _check
from labkit.engine.cache import StaticKVCache
from labkit.engine.decode import Decoder
from labkit.engine.placement import step_input
from labkit.engine.sampling import most_likely
from labkit.engine.step import run_step
from labkit.kv_cache.interface import StepInput
from labkit.speculative.eagle_file import SHIPPED, load_model_file
from labkit.speculative.eagle_model import EagleModel
from labkit.speculative.eagle_ops import HeadOps, check_target, head_ops
from labkit.speculative.interface import Proposal, Sampling
from labkit.speculative.tree import DraftTree


@dataclass(frozen=True)
class _Guess:
    """What the head says at one place of each row: its feature `(batch, 1, hidden_size)`, and the logits
    `(batch, draft vocabulary)` of the token after next."""

    feature: Tensor
    logits: Tensor


class EagleHead:
    """A drafter that reads the target's hidden states (EAGLE, Li et al. 2024; `labkit.speculative.eagle_model`).

    tree: None drafts a chain, the likeliest token or, in sampling, one drawn from the head's own distribution. A
    `DraftTree` is filled with the likeliest tokens, by rank, and verified in one pass; γ then cuts its depth.
    The head runs in the target's dtype, with the target's embedding and output matrix; where the target's matrices are
    packed, so are the head's, to as many bits.
    """

    wants_hidden = True

    def __init__(self, model: EagleModel, tree: DraftTree | None = None) -> None:
        _check.require(isinstance(model, EagleModel), "model", type(model).__name__, "an EagleModel")
        takes = "a DraftTree of at least one token, or None for a chain"
        fits = tree is None or (isinstance(tree, DraftTree) and len(tree) > 0)
        _check.require(fits, "tree", tree, takes)
        self.model, self.tree = model, tree
        self._ops: HeadOps | None = None

    @classmethod
    def load(cls, path: str | Path | None = None, *, tree: DraftTree | None = None) -> EagleHead:
        """The head in a safetensors file; by default the one of the default model that ships with the course.

        Errors: ValueError for a file that is not one.
        """
        return cls(load_model_file(SHIPPED if path is None else path), tree)

    @torch.inference_mode()
    def begin(self, target: Decoder, input_ids: Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        """Start after `input_ids (batch, prompt)`. Errors: ValueError for a target of another shape."""
        check_target(self.model.config, target)
        if self._ops is None or not self._ops.made_for(target):
            self._ops = head_ops(self.model, target)
        batch, self._prompt = input_ids.shape
        config = self._ops.layer_config
        length = min(self._prompt + 256, config.max_position_embeddings)
        self._cache = StaticKVCache(config, batch, length, dtype=target.dtype, device=target.device)
        self._ops.vocabulary.reset()
        self._ops.vocabulary.add(input_ids.flatten().tolist())
        self._sampling, self._generator = sampling, generator
        self._pending: list[tuple[Tensor, list[int]]] = []
        self._skipped: int | None = None

    @torch.inference_mode()
    def observe(self, hidden: Tensor, kept: list[int]) -> None:
        """Take the target's `hidden (batch, q_len, hidden_size)`, of which row b's first `kept[b]` are verified."""
        if self._skipped is None:
            # Of a prompt that lay in a prefix cache in part the rest alone has hidden states: places count from there.
            self._skipped = self._prompt - kept[0]
        self._pending.append((hidden[:, : max(kept)], kept))

    @torch.inference_mode()
    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        """At most `n` tokens after `rows`; none where the target has told no hidden state yet, or room runs out."""
        guess = self._absorb(rows)
        lengths = self._cache.lengths
        n = min(n, self._ops.layer_config.max_position_embeddings - max(lengths))
        if guess is None or n < 1:
            return Proposal(torch.zeros(len(rows), 0, dtype=torch.int64, device=self._cache.keys.device))
        try:
            return self._chain(guess, n) if self.tree is None else self._filled(guess, self.tree.cut(n))
        finally:
            # What was drafted is a guess: the next verified hidden states take its place.
            self._cache.crop_rows_to(lengths)

    def _absorb(self, rows: list[list[int]]) -> _Guess | None:
        """Run all verified hidden states through the layer; what it says after the last of them."""
        guess = None
        for hidden, kept in self._pending:
            if not max(kept):
                continue
            starts = self._cache.lengths
            tokens = [
                row[first : first + count] + [0] * (hidden.shape[1] - count)
                for row, count, first in zip(rows, kept, (self._skipped + start + 1 for start in starts), strict=True)
            ]
            self._ops.vocabulary.add(token for row in tokens for token in row)
            tokens = torch.tensor(tokens, device=hidden.device)
            logits, features = self._step(tokens, hidden, last=len(set(kept)) == 1)
            self._cache.crop_rows_to([start + count for start, count in zip(starts, kept, strict=True)])
            at = torch.tensor([max(count, 1) - 1 for count in kept], device=hidden.device)
            by_row = torch.arange(len(rows), device=hidden.device)
            guess = _Guess(features[by_row, at][:, None], logits[by_row, at if logits.shape[1] > 1 else 0])
        self._pending.clear()
        return guess

    def _step(
        self, tokens: Tensor, features: Tensor, at: StepInput | None = None, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Append pairs `(batch, q_len)`: logits `(batch, q_len, draft vocabulary)`, of the last alone on demand, and
        features `(batch, q_len, hidden_size)`."""
        cache, q_len = self._cache, tokens.shape[1]
        if cache.length + q_len > cache.max_length:
            most = self._ops.layer_config.max_position_embeddings
            cache = self._cache = cache.grown(min(cache.length + q_len + 256, most))
        if at is None:
            at = step_input(self._ops.rotary, cache.lengths if cache.ragged else cache.length, q_len, None)
        logits, out = run_step(self._ops.step, (tokens, features), at, cache, logits_to_keep=1 if last else None)
        cache.advance(q_len)
        return logits, out

    def _chain(self, guess: _Guess, n: int) -> Proposal:
        tokens, probs = [], []
        for drafted in range(n):
            token, q = self._pick(guess.logits)
            tokens.append(token)
            probs.append(q)
            if drafted + 1 < n:
                logits, feature = self._step(token[:, None], guess.feature)
                guess = _Guess(feature, logits[:, -1])
        return Proposal(torch.stack(tokens, 1), None if self._sampling.greedy else torch.stack(probs, 1))

    def _pick(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """A token `(batch,)` of the target's, and the q `(batch, vocab_size)` that it was drawn from."""
        if self._sampling.greedy:
            return self._ops.vocabulary.ids[most_likely(logits)], None
        q = self._sampling.probabilities(logits)
        token = self._ops.vocabulary.ids[torch.multinomial(q, 1, generator=self._generator).squeeze(1)]
        whole = q.new_zeros(len(q), self.model.config.vocab_size)
        return token, whole.index_copy_(1, self._ops.vocabulary.ids, q)

    def _filled(self, guess: _Guess, tree: DraftTree) -> Proposal:
        """The tree's tokens, level by level: a node's children are the likeliest tokens after it."""
        batch = len(guess.logits)
        tokens = torch.zeros(batch, len(tree), dtype=torch.int64, device=guess.logits.device)
        self._fill(tokens, tree, [0], guess.logits[:, None])
        features = {0: guess.feature}
        past, fed = self._cache.lengths, []
        for level in range(1, tree.depth):
            nodes = [node for node, at in enumerate(tree.depths, 1) if at == level and tree.children(node)]
            before = torch.cat([features[tree.parents[node - 1]] for node in nodes], dim=1)
            fed += nodes
            at = self._ops.level_input(tree, fed, len(nodes), past)
            logits, out = self._step(tokens[:, [node - 1 for node in nodes]], before, at)
            features |= {node: out[:, index : index + 1] for index, node in enumerate(nodes)}
            self._fill(tokens, tree, nodes, logits)
        return Proposal(tokens, tree=tree)

    def _fill(self, tokens: Tensor, tree: DraftTree, nodes: list[int], logits: Tensor) -> None:
        """Put the children of `nodes` into `tokens`, from their `logits (batch, len(nodes), draft vocabulary)`."""
        for index, node in enumerate(nodes):
            children = tree.children(node)
            best = logits[:, index].topk(min(len(children), logits.shape[-1])).indices
            places = torch.tensor([child - 1 for child in children[: best.shape[1]]], device=tokens.device)
            tokens[:, places] = self._ops.vocabulary.ids[best]
