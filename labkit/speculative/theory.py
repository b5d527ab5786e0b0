"""What speculation can gain: expected tokens a verifying call, and the time model.

α is the probability that a drafted token is accepted, taken as the same at each place and independent of the others;
γ is the number of drafted tokens a call. Costs are times, in units of one plain decode step of the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from labkit import _check

if TYPE_CHECKING:
    from labkit.speculative.tree import DraftTree

# Of the acceptance that `required_alpha` finds: below what any run can tell apart.
_BISECTIONS = 60
# Far past any draft: each term of the sum is a drafted token.
_MOST_DRAFTED = 1_000_000


def expected_tokens(alpha: float, gamma: int) -> float:
    """E = (1 - α^(γ+1)) / (1 - α) = 1 + α + … + α^γ: tokens a verifying call, the target's own included; γ + 1 at
    α = 1 (Leviathan et al., 2023, equation 1).

    A call emits its token i (from 0) if the i drafts before it were accepted, which has probability α^i. Added up as
    the sum, which loses nothing near α = 1.
    """
    alpha = _check.number("alpha", alpha, 0.0, 1.0)
    return math.fsum(alpha**i for i in range(_check.integer("gamma", gamma, 0, _MOST_DRAFTED) + 1))


def expected_speedup(alpha: float, gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """E / (γ c + v): tokens a call over the time of a call (Leviathan et al., 2023, theorem 3.8, where v = 1).

    draft_cost: c, the time of drafting one token over that of a plain decode step. verify_cost: v, that of the
    target's pass over γ + 1 tokens over the same step. Plain decoding emits one token a step, so this is the ratio of
    the speeds.
    """
    _check.number("draft_cost", draft_cost, 0.0)
    _check.number("verify_cost", verify_cost, 0.0)
    _check.require(verify_cost > 0, "verify_cost", verify_cost, "a number above 0")
    return expected_tokens(alpha, gamma) / (gamma * draft_cost + verify_cost)


def best_gamma(
    alpha: float, draft_cost: float, verify_cost: Callable[[int], float] | float = 1.0, most: int = 16
) -> int:
    """The γ from 0 to `most` with the largest expected speed-up, the smallest of equals; 0 where nothing beats plain
    decoding. verify_cost: v, or v as a function of γ, which is asked from γ = 1 on: γ = 0 is a plain step."""
    _check.integer("most", most, 0)
    cost = verify_cost if callable(verify_cost) else lambda gamma: verify_cost
    _check.number("alpha", alpha, 0.0, 1.0)
    speedups = [1.0] + [expected_speedup(alpha, gamma, draft_cost, cost(gamma)) for gamma in range(1, most + 1)]
    return speedups.index(max(speedups))


def required_alpha(gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """The acceptance from which speculation pays: the α with E = γ c + v, found by bisection, as E grows with α.

    0 where even a draft that is never right costs nothing more than a plain step; infinity where not even a perfect
    one pays, so that no α reaches it.
    """
    if expected_speedup(1.0, gamma, draft_cost, verify_cost) < 1:
        return math.inf
    low, high = 0.0, 1.0
    if expected_speedup(low, gamma, draft_cost, verify_cost) >= 1:
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if expected_speedup(middle, gamma, draft_cost, verify_cost) < 1:
            low = middle
        else:
            high = middle
    return high


def expected_tree_tokens(tree: DraftTree, accept_by_rank: Sequence[float]) -> float:
    """Tokens a verifying call of a static tree, the target's own included, where a node's child of rank r is the
    target's token with probability `accept_by_rank[r]`, whatever came before.

    Each node is reached with the product of these along its path, and adds a token when it is (Cai et al., 2024,
    section 2.3.3, take the same sum to choose a tree). The children of a node exclude each other, so what is given
    must sum to at most 1. A chain with `[α]` gives `expected_tokens(α, γ)`.
    """
    rates = [_check.number(f"accept_by_rank[{rank}]", rate, 0.0, 1.0) for rank, rate in enumerate(accept_by_rank)]
    widest = max(tree.ranks, default=-1) + 1
    _check.require(len(rates) >= widest, "accept_by_rank", rates, f"a probability for each of {widest} ranks")
    total = math.fsum(rates)
    _check.require(total <= 1 + 1e-9, "accept_by_rank", rates, f"probabilities that sum to at most 1, not {total}")
    reached = [1.0]
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        reached.append(reached[parent] * rates[rank])
    return math.fsum(reached)
