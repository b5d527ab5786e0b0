"""The two wrong rules are wrong, by how much, and the test that passes the right one finds both."""

import pytest
import torch

from labkit.speculative.acceptance import accept_sampled, acceptance
from labkit.speculative.wrong_rules import (
    accept_chances,
    accept_p_over_itself,
    accept_with_p_alone,
    output_distribution,
    total_variation,
)

from .chains import DRAWS, VOCAB, chain_call, joint, three_tokens, transitions
from .distribution import chi_square_p_value, counted

RULES = {"right": accept_sampled, "p alone": accept_with_p_alone, "p over itself": accept_p_over_itself}
WRONG = ("p alone", "p over itself")


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("k", [1, 3])
def test_the_wrong_rules_fail_the_test_that_the_right_one_passes(name: str, k: int) -> None:
    target, draft = transitions(1), transitions(7)
    value = {
        rule: chi_square_p_value(counted(three_tokens(chain_call(RULES[rule], target, draft, k)), VOCAB), joint(target))
        for rule in ("right", name)
    }
    assert value["right"] > 1e-3 and value[name] < 1e-100


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", [7, 8])
def test_the_exact_output_is_what_comes_out(name: str, seed: int) -> None:
    """Counted over many calls with one drafted token; another rule's output it is not."""
    p, q = transitions(1)[0], transitions(seed)[0]
    drafts = torch.multinomial(q, DRAWS, replacement=True)[:, None]
    generator = torch.Generator().manual_seed(0)
    verdict = RULES[name](drafts, q.expand(DRAWS, 1, VOCAB), p.expand(DRAWS, 2, VOCAB), generator)
    first = torch.where(verdict.n_accepted == 1, drafts[:, 0], verdict.next_token)
    counts = counted(first[:, None], VOCAB)
    for other, rule in RULES.items():
        value = chi_square_p_value(counts, output_distribution(rule, p, q))
        assert value > 1e-3 if other == name else value < 1e-10


@pytest.mark.parametrize("seed", range(5))
def test_the_bias_in_total_variation(seed: int) -> None:
    """None for the right rule; the draft's own distance for p over itself, which keeps all; p alone lies between."""
    p, q = transitions(seed)[1], transitions(seed + 20)[1]
    bias = {name: total_variation(output_distribution(rule, p, q), p) for name, rule in RULES.items()}
    assert bias["right"] < 1e-6
    assert bias["p over itself"] == pytest.approx(total_variation(q, p), abs=1e-6)
    assert bias["p alone"] > 0.01
    for rule in RULES.values():
        assert float(output_distribution(rule, p, q).sum()) == pytest.approx(1, abs=1e-6)


def test_what_the_rules_accept() -> None:
    """p alone accepts too little, p over itself nearly everything, whatever the draft is worth."""
    p, q = transitions(1)[0].double(), transitions(8)[0].double()
    share = {name: float((q * accept_chances(rule, p, q)).sum()) for name, rule in RULES.items()}
    assert share["right"] == pytest.approx(float(acceptance(p, q)))
    assert share["p alone"] < share["right"] < 0.95 < 0.999 < share["p over itself"]


def test_p_alone_is_right_for_a_point_mass() -> None:
    """There q is 1 at the drafted token: the mistake does not show with prompt lookup, and does with a draft model."""
    p, q = transitions(1)[0], torch.tensor([0.0, 1.0, 0.0, 0.0])
    assert total_variation(output_distribution(accept_with_p_alone, p, q), p) < 1e-6
    assert total_variation(output_distribution(accept_p_over_itself, p, q), p) > 0.1
    drafts = torch.ones(1000, 1, dtype=torch.int64)
    verdicts = [
        rule(drafts, None, p.expand(1000, 2, VOCAB), torch.Generator().manual_seed(3))
        for rule in (accept_sampled, accept_with_p_alone)
    ]
    assert torch.equal(verdicts[0].n_accepted, verdicts[1].n_accepted)
    assert torch.equal(verdicts[0].next_token, verdicts[1].next_token)


def test_zeros_in_either_distribution() -> None:
    p, q = torch.tensor([0.0, 0.5, 0.5, 0.0]), torch.tensor([0.5, 0.0, 0.5, 0.0])
    torch.testing.assert_close(output_distribution(accept_sampled, p, q), p.double())
    for rule in RULES.values():
        assert bool(output_distribution(rule, p, q).isfinite().all())


def test_total_variation() -> None:
    assert total_variation(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 1
    assert total_variation(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])) == 0.25


def test_what_does_not_fit_is_refused() -> None:
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="rule: got .*accept_sampled, accept_with_p_alone, accept_p_over_itself"):
        output_distribution(print, p, p)
    with pytest.raises(ValueError, match="p: got .*a distribution"):
        output_distribution(accept_sampled, p * 2, p)
    with pytest.raises(ValueError, match="q: got .*a distribution"):
        output_distribution(accept_sampled, p, torch.tensor([1.0]))
    with pytest.raises(ValueError, match="b: got"):
        total_variation(p, torch.tensor([1.0]))
