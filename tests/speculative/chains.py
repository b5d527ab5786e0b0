"""A target and drafts small enough to know all about: each token's distribution depends on the one before it.

What a rule emits over several calls can then be counted against the target's exact joint distribution, so that a bonus
or a residual read at another place shows.
"""

from collections.abc import Callable

import torch

VOCAB = 4
DRAWS = 100_000
TOKENS = 3

# From the token before, one a row, the tokens that a call emits after it, padded with -1.
Call = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def transitions(seed: int, sharpness: float = 1.5) -> torch.Tensor:
    """`(VOCAB, VOCAB)`: the distribution after each token."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return (logits * sharpness).softmax(-1)


def joint(target: torch.Tensor) -> torch.Tensor:
    """The exact distribution `(VOCAB,) * 3` of the three tokens after token 0."""
    return torch.einsum("a,ab,bc->abc", target[0].double(), target.double(), target.double())


def three_tokens(call: Call, seed: int = 0, draws: int = DRAWS) -> torch.Tensor:
    """The first three tokens after token 0 of each of `draws` rows, in as many calls as they take."""
    generator = torch.Generator().manual_seed(seed)
    emitted = torch.full((draws, TOKENS + 16), -1)
    emitted[:, 0], length = 0, torch.ones(draws, dtype=torch.int64)
    while bool((length <= TOKENS).any()):
        rows = (length <= TOKENS).nonzero().squeeze(1)
        new = call(emitted[rows, length[rows] - 1], generator)
        for place in range(new.shape[1]):
            real = new[:, place] >= 0
            emitted[rows[real], length[rows[real]]] = new[real, place]
            length[rows[real]] += 1
    return emitted[:, 1 : TOKENS + 1]


def draft_chain(draft: torch.Tensor, last: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """k tokens `(rows, k)` drawn one after another from `draft`, the distribution after each token."""
    tokens = []
    for _ in range(k):
        last = torch.multinomial(draft[last], 1, generator=generator).squeeze(1)
        tokens.append(last)
    return torch.stack(tokens, 1)


def emitted_by(verdict, drafts: torch.Tensor) -> torch.Tensor:
    """The accepted tokens of each row, then the target's own, padded with -1: `(rows, k + 1)`."""
    place = torch.arange(drafts.shape[1] + 1)
    padded = torch.cat((drafts, drafts.new_full((len(drafts), 1), -1)), 1)
    padded = torch.where(place < verdict.n_accepted[:, None], padded, -1)
    return torch.where(place == verdict.n_accepted[:, None], verdict.next_token[:, None], padded)


def chain_call(rule, target: torch.Tensor, draft: torch.Tensor, k: int, points: bool = False) -> Call:
    """A call of `rule` on chains of k tokens drawn from `draft`; `points`: q is not told, as each is certain."""

    def call(last: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        drafts = draft_chain(draft, last, k, generator)
        before = torch.cat((last[:, None], drafts), 1)
        q = None if points else draft[before[:, :-1]]
        return emitted_by(rule(drafts, q, target[before], generator), drafts)

    return call
