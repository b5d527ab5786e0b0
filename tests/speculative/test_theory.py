"""The formulas: against a simulation, against published figures, and at their ends."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.speculative.theory import (
    best_gamma,
    expected_speedup,
    expected_tokens,
    expected_tree_tokens,
    required_alpha,
)
from labkit.speculative.tree import DraftTree

alphas = st.floats(0, 1)


@given(alphas, st.integers(0, 30))
def test_expected_tokens_is_the_closed_form(alpha: float, gamma: int) -> None:
    tokens = expected_tokens(alpha, gamma)
    assert 1 <= tokens <= gamma + 1
    if alpha < 0.999:
        assert tokens == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-9)


def test_expected_tokens_counts_what_is_emitted() -> None:
    """Drafts accepted with chance α each, up to the first that is not; then one more token."""
    accepted = torch.rand(200_000, 5) < 0.7
    emitted = accepted.long().cumprod(1).sum(1).double().mean() + 1
    assert float(emitted) == pytest.approx(expected_tokens(0.7, 5), abs=0.02)


def test_the_ends() -> None:
    assert expected_tokens(1.0, 4) == expected_tokens(1, 4) == 5
    assert expected_tokens(1 - 1e-12, 4) == pytest.approx(5)
    assert expected_tokens(0.0, 4) == expected_tokens(0.3, 0) == expected_tokens(0.0, 0) == 1
    assert expected_speedup(0.5, 0, 3.0) == 1 and expected_speedup(0.0, 4, 0.0) == 1


def test_folklore_and_what_is_right() -> None:
    """80% and 50% at γ = 4: 3.36 and 1.94 tokens, 2.8 and 1.6 times the speed at c = 0.05; not 5 and 2 times."""
    assert [round(expected_tokens(alpha, 4), 2) for alpha in (0.8, 0.5)] == [3.36, 1.94]
    assert [round(expected_speedup(alpha, 4, 0.05), 1) for alpha in (0.8, 0.5)] == [2.8, 1.6]
    assert expected_tokens(0.8, 200) == pytest.approx(5)


@given(st.floats(0, 0.99), st.floats(0.01, 2), st.floats(0.5, 3))
def test_best_gamma_is_the_best(alpha: float, draft_cost: float, growth: float) -> None:
    def cost(gamma: int) -> float:
        return 1 + 0.05 * gamma**growth

    best = best_gamma(alpha, draft_cost, cost, most=10)
    speed = [1.0] + [expected_speedup(alpha, g, draft_cost, cost(g)) for g in range(1, 11)]
    assert speed[best] == max(speed) and all(other < speed[best] for other in speed[:best])


def test_best_gamma_is_none_where_plain_decoding_wins() -> None:
    assert best_gamma(0.5, 1.0) == 0  # the draft costs what the target does
    assert best_gamma(0.9, 0.0, 2.0, most=0) == 0
    assert best_gamma(1.0, 0.01) == 16 and best_gamma(0.8, 0.05) == 8
    asked = []
    best_gamma(0.5, 0.1, lambda gamma: asked.append(gamma) or 1.0, most=3)
    assert asked == [1, 2, 3]


@given(st.integers(1, 12), st.floats(0, 0.5), st.floats(1, 4))
def test_required_alpha_is_where_it_starts_to_pay(gamma: int, draft_cost: float, verify_cost: float) -> None:
    alpha = required_alpha(gamma, draft_cost, verify_cost)
    if math.isinf(alpha):
        assert expected_speedup(1.0, gamma, draft_cost, verify_cost) < 1
        return
    assert expected_speedup(alpha, gamma, draft_cost, verify_cost) >= 1
    if alpha:
        assert expected_speedup(alpha * (1 - 1e-6), gamma, draft_cost, verify_cost) <= 1


def test_required_alpha_by_hand() -> None:
    """γ = 1: 1 + α = c + v."""
    assert required_alpha(1, 0.1, 1.5) == pytest.approx(0.6)
    assert required_alpha(4, 0.0, 1.0) == 0 and required_alpha(1, 0.5, 1.5) == pytest.approx(1)
    assert required_alpha(2, 0.5, 2.1) == math.inf


def test_expected_tree_tokens() -> None:
    """Two chances at the first token, two at the second behind the first of them, one behind the other."""
    tree = DraftTree.of_ranks([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert expected_tree_tokens(tree, [0.6, 0.2]) == pytest.approx(1 + 0.8 + 0.6 * 0.8 + 0.2 * 0.6)
    assert expected_tree_tokens(DraftTree(()), []) == 1
    for gamma in (0, 1, 5):
        assert expected_tree_tokens(DraftTree.chain(gamma), [0.7]) == pytest.approx(expected_tokens(0.7, gamma))


def test_a_tree_in_any_order_of_its_nodes() -> None:
    level = expected_tree_tokens(DraftTree((0, 0, 1, 2)), [0.5, 0.3])
    assert expected_tree_tokens(DraftTree((0, 1, 0, 3)), [0.5, 0.3]) == pytest.approx(level)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 4), "alpha: got 1.1"),
        (lambda: expected_tokens(-0.1, 4), "alpha: got -0.1"),
        (lambda: expected_tokens(0.5, -1), "gamma: got -1"),
        (lambda: expected_tokens(0.5, 1.5), "gamma: got 1.5"),
        (lambda: expected_speedup(0.5, 4, -0.1), "draft_cost: got"),
        (lambda: expected_speedup(0.5, 4, 0.1, 0.0), "verify_cost: got 0.0"),
        (lambda: best_gamma(2, 0.1, most=0), "alpha: got 2"),
        (lambda: required_alpha(-1, 0.1), "gamma: got -1"),
        (lambda: expected_tree_tokens(DraftTree((0, 0)), [0.5]), "a probability for each of 2 ranks"),
        (lambda: expected_tree_tokens(DraftTree((0, 0)), [0.6, 0.6]), "sum to at most 1, not 1.2"),
        (lambda: expected_tree_tokens(DraftTree((0,)), [1.5]), r"accept_by_rank\[0\]: got 1.5"),
    ],
)
def test_what_is_out_of_range_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
