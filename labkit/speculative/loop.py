"""The loop itself: draft, verify in one pass of the target, keep what agrees, and one token of the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from labkit.engine.decode import Decoder
from labkit.engine.sampling import most_likely, sample
from labkit.measure import synchronize, track_peak
from labkit.speculative.acceptance import accept_greedy, accept_sampled, accept_tree
from labkit.speculative.interface import Proposal, Proposer, Sampling
from labkit.speculative.stats import Call, SpeculativeStats


@dataclass(frozen=True)
class SpeculativeOutput:
    """`sequences (batch, prompt + new)`, shorter rows padded with the token that ended them; what was counted; seconds
    to the first verified tokens, and per token of the longest row after them; new tokens of all rows over the whole
    time; peak memory as in `GenerationResult`."""

    sequences: Tensor
    stats: SpeculativeStats
    ttft_s: float
    tpot_s: float
    tokens_per_second: float
    peak_bytes: int | None


@dataclass
class SpeculativeLoop:
    """One generation: what it was asked for, and the rows as far as they have come. The cache holds all of a row but
    its last token, which the next verifying call begins with."""

    decoder: Decoder
    proposer: Proposer
    sampling: Sampling
    generator: torch.Generator
    gamma: int
    limit: int
    stop: frozenset[int]
    streamer: BaseStreamer | None
    watch: Callable[[Call], None] | None
    rows: list[list[int]] = field(default_factory=list)
    running: list[bool] = field(default_factory=list)
    stats: SpeculativeStats = SpeculativeStats()

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor) -> SpeculativeOutput:
        prompt = input_ids.shape[1]
        times = []
        # Steps of another thread in between would be read as this one's.
        with self.decoder.turn, track_peak(self.decoder.device) as peak:
            if self.streamer is not None:
                self.decoder.turn.tell(self.streamer.put, input_ids.cpu())
            synchronize(self.decoder.device)
            begin = time.perf_counter()
            self.read_prompt(input_ids)
            while True:
                synchronize(self.decoder.device)
                times.append((time.perf_counter() - begin, max(map(len, self.rows)) - prompt))
                if not any(self.running):
                    break
                self.call()
        if self.streamer is not None:
            self.streamer.end()
        (ttft, first), (total, last) = times[0], times[-1]
        tpot = (total - ttft) / (last - first) if last > first else float("nan")
        rate = sum(len(row) - prompt for row in self.rows) / total
        return SpeculativeOutput(self._sequences(), self.stats, ttft, tpot, rate, peak.bytes)

    def read_prompt(self, input_ids: Tensor) -> None:
        """Start the rows: the prompt's pass, as plain decoding has it, and the first token, which it yields."""
        self.rows, self.running = input_ids.tolist(), [True] * len(input_ids)
        self.decoder.reset()
        self.decoder.reserve(len(input_ids), self.limit)
        self.proposer.begin(self.decoder, input_ids, self.sampling, self.generator)
        tokens = input_ids[:, self.decoder.cache.begin(input_ids) :]
        logits, hidden = self.forward(tokens, logits_to_keep=1)
        s = self.sampling
        first = sample(logits[:, -1], s.temperature, s.top_k, s.top_p, self.generator)
        for index, token in enumerate(first.tolist()):
            self._append(index, [token])
            self._report(Call(index, (), 0, (token,), "prompt"))
        self._tell(hidden, [tokens.shape[1]] * len(tokens))

    def forward(self, tokens: Tensor, **options: object) -> tuple[Tensor, Tensor | None]:
        """Logits, and the hidden states where the proposer wants them."""
        if self.proposer.wants_hidden:
            return self.decoder.forward(tokens, return_hidden=True, **options)
        return self.decoder.forward(tokens, **options), None

    def _report(self, call: Call) -> None:
        if self.watch is not None:
            self.decoder.turn.tell(self.watch, call)

    def _tell(self, hidden: Tensor | None, kept: list[int]) -> None:
        if hidden is not None:
            self.proposer.observe(hidden, kept)

    def call(self) -> None:
        """Draft, verify, accept: one pass of the target."""
        proposal = self.draft()
        starts = [len(row) - 1 for row in self.rows]
        last = torch.tensor([[row[-1]] for row in self.rows], device=self.decoder.device)
        tokens = torch.cat((last, proposal.tokens), dim=1)
        mask = None if proposal.tree is None else proposal.tree.mask
        logits, hidden = self.forward(tokens, tree_mask=mask)
        paths, next_tokens = self._verdict(proposal, logits)
        drafts = proposal.tokens.tolist()
        kept = [
            self._grow(index, proposal, drafts[index], paths[index], next_tokens[index])
            for index in range(len(self.rows))
        ]
        self.stats += SpeculativeStats(n_target_calls=1)
        if proposal.tree is None:
            if min(kept) <= proposal.tokens.shape[1]:
                self.decoder.crop([start + count for start, count in zip(starts, kept, strict=True)])
        else:
            places = [[0, *(node + 1 for node in path)] for path in paths]
            places = [path[:count] for path, count in zip(places, kept, strict=True)]
            self.decoder.keep(starts, places)
            hidden = None if hidden is None else _gathered(hidden, places)
        self._tell(hidden, kept)

    def draft(self) -> Proposal:
        """At most γ tokens, and none that no running row has room for: the last token is the target's own. Of a tree
        every node takes a place of the cache, until its path is known."""
        shortest = min(len(row) for row, runs in zip(self.rows, self.running, strict=True) if runs)
        room = self.decoder.model.config.max_position_embeddings - max(map(len, self.rows))
        n = min(self.gamma, self.limit - shortest - 1, room)
        if n > 0:
            proposal = self.proposer.propose(self.rows, n)
            if proposal.tree is None or len(proposal.tree) <= room:
                return proposal
            return Proposal(proposal.tokens[:, :room], tree=proposal.tree.first(room))
        return Proposal(torch.zeros(len(self.rows), 0, dtype=torch.int64, device=self.decoder.device))

    def _verdict(self, proposal: Proposal, logits: Tensor) -> tuple[list[list[int]], list[int]]:
        """Of each row: the accepted drafts, by index, and the target's own token after them."""
        said = most_likely(logits) if self.sampling.greedy else self.sampling.probabilities(logits)
        if proposal.tree is not None:
            verdict = accept_tree(proposal.tree, proposal.tokens, said, self.generator)
            return verdict.paths, verdict.next_token.tolist()
        if self.sampling.greedy:
            verdict = accept_greedy(proposal.tokens, said)
        else:
            verdict = accept_sampled(proposal.tokens, proposal.probs, said, self.generator)
        return [list(range(count)) for count in verdict.n_accepted.tolist()], verdict.next_token.tolist()

    def _grow(self, index: int, proposal: Proposal, drafted: list[int], path: list[int], next_token: int) -> int:
        """Append what row `index` gains, and return how many of the tokens it was fed are its own now."""
        if not self.running[index]:
            return 0
        emitted = [*(drafted[node] for node in path), next_token]
        cut = self._append(index, emitted)
        matches = min(len(path), len(emitted))
        refused = not cut and _goes_on(proposal, path)
        kind = "cut" if cut else "residual" if refused else "bonus"
        self.stats += SpeculativeStats(len(drafted), matches + refused, matches, 0, 1, len(emitted))
        self._report(Call(index, tuple(drafted), matches, tuple(emitted), kind))
        return len(emitted)

    def _append(self, index: int, emitted: list[int]) -> bool:
        """Add tokens to a row, up to where an end-of-text token or the length ends it; what is beyond goes from
        `emitted` too. Returns whether anything did."""
        row, new = self.rows[index], len(emitted)
        end = next((place for place, token in enumerate(emitted, 1) if token in self.stop), new)
        del emitted[min(end, self.limit - len(row)) :]
        row.extend(emitted)
        self.running[index] = len(row) < self.limit and row[-1] not in self.stop
        if self.streamer is not None:
            self.decoder.turn.tell(self.streamer.put, torch.tensor([emitted]))
        return len(emitted) < new

    def _sequences(self) -> Tensor:
        longest = max(map(len, self.rows))
        padded = [row + [row[-1]] * (longest - len(row)) for row in self.rows]
        return torch.tensor(padded, device=self.decoder.device)


def _goes_on(proposal: Proposal, path: list[int]) -> bool:
    """Whether the draft had more after the accepted part: then the target has refused it."""
    if proposal.tree is None:
        return len(path) < proposal.tokens.shape[1]
    return bool(proposal.tree.children(path[-1] + 1 if path else 0))


def _gathered(hidden: Tensor, places: list[list[int]]) -> Tensor:
    """`hidden (batch, q_len, hidden_size)` in the order of each row's places; what a row lacks is padded."""
    longest = max(map(len, places))
    index = torch.tensor([path + [0] * (longest - len(path)) for path in places], device=hidden.device)
    return hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[-1]))
