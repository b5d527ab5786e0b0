"""Proposers of known quality, for tests: what they draft is scripted, so that every count is known beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.speculative import DraftTree, Proposal


class Scripted:
    """Drafts row b's continuation `scripts[b]`, known beforehand; a token for which `wrong(place)` holds is off by
    one, `place` counting from the script's start."""

    wants_hidden = False

    def __init__(self, scripts: list[list[int]], vocab: int, wrong: Callable[[int], bool] = lambda place: False):
        self.scripts, self.vocab, self.wrong = scripts, vocab, wrong

    def begin(self, target, input_ids, sampling, generator):
        self.prompt, self.device = input_ids.shape[1], input_ids.device

    def token(self, row: int, place: int) -> int:
        script = self.scripts[row]
        right = script[place] if place < len(script) else 0
        return (right + 1) % self.vocab if self.wrong(place) else right

    def propose(self, rows, n):
        starts = [len(row) - self.prompt for row in rows]
        drafts = [[self.token(row, start + i) for i in range(n)] for row, start in enumerate(starts)]
        return Proposal(torch.tensor(drafts, device=self.device))


class ScriptedTree(Scripted):
    """The same as a tree: the right path is the last child of each node, wrong ones stand before it."""

    def __init__(self, *args, width: int = 2, **options):
        super().__init__(*args, **options)
        self.width = width

    def propose(self, rows, n):
        parents, last = [], 0
        for _ in range(n):
            parents += [last] * self.width
            last = len(parents)
        tree = DraftTree(tuple(parents))
        drafts = []
        for row, tokens in enumerate(rows):
            start, line = len(tokens) - self.prompt, []
            for depth in range(n):
                right = self.token(row, start + depth)
                line += [(right + 1 + i) % self.vocab for i in range(self.width - 1)] + [right]
            drafts.append(line)
        return Proposal(torch.tensor(drafts, device=self.device), tree=tree)


class RandomDrafts:
    """Draws each token from `q (vocab,)`, whatever came before, and says so; `points`: tells no q, as of tokens that
    were chosen without chance, which they must then be: q is one-hot."""

    wants_hidden = False

    def __init__(self, q: torch.Tensor, points: bool = False):
        self.q, self.points = q, points

    def begin(self, target, input_ids, sampling, generator):
        self.generator = generator

    def propose(self, rows, n):
        q = self.q.expand(len(rows), n, -1)
        drafts = torch.multinomial(q.reshape(-1, q.shape[-1]), 1, generator=self.generator).view(len(rows), n)
        return Proposal(drafts, None if self.points else q)


class Listening(Scripted):
    """Keeps what it is told of hidden states."""

    wants_hidden = True

    def begin(self, target, input_ids, sampling, generator):
        super().begin(target, input_ids, sampling, generator)
        self.heard = [[] for _ in self.scripts]

    def observe(self, hidden, kept):
        for row, count in enumerate(kept):
            self.heard[row].append(hidden[row, :count].clone())


class ListeningTree(ScriptedTree, Listening):
    """Both."""
