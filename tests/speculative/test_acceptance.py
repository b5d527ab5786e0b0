"""The accept rules: the target's distribution exactly, whatever the draft is; and nothing at the edges breaks them."""

import pytest
import torch

from labkit.speculative.acceptance import accept_greedy, accept_sampled, acceptance, residual

from .chains import DRAWS, VOCAB, chain_call, joint, three_tokens, transitions
from .distribution import chi_square_p_value, counted

# Seeds are fixed, so a right rule stays above this for good; a wrong one falls below it by hundreds of decades.
ENOUGH = 1e-3


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hated(target: torch.Tensor) -> torch.Tensor:
    """A draft that puts everything on what the target finds least likely."""
    return torch.nn.functional.one_hot(target.argmin(-1), VOCAB).float()


def p_value(rule, target: torch.Tensor, draft: torch.Tensor, k: int, points: bool = False) -> float:
    tokens = three_tokens(chain_call(rule, target, draft, k, points))
    assert len(tokens) >= 100_000
    return chi_square_p_value(counted(tokens, VOCAB), joint(target))


DRAFTS = {
    "by chance": lambda target: transitions(7),
    "near": lambda target: (target.log() + 0.3 * transitions(9)).softmax(-1),
    "the target": lambda target: target,
    "against": lambda target: (-4 * target.log()).softmax(-1),
    "hated": hated,
    "never the likeliest": lambda target: target.scatter(1, target.argmax(1, keepdim=True), 0.0).softmax(-1),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("k", [1, 3])
def test_what_is_emitted_has_the_targets_distribution(draft: str, k: int) -> None:
    """Three tokens jointly, over as many calls as they take: accepted, residual and bonus in every place."""
    target = transitions(1)
    assert p_value(accept_sampled, target, DRAFTS[draft](target), k) > ENOUGH


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("kind", ["likeliest", "hated"])
def test_point_masses_give_the_targets_distribution(kind: str, k: int) -> None:
    target = transitions(2)
    certain = hated(target) if kind == "hated" else hated(-target)
    assert p_value(accept_sampled, target, certain, k, points=True) > ENOUGH


def test_a_target_that_leaves_tokens_out_never_emits_them() -> None:
    """As after top-k: p has zeros where q has none."""
    target = transitions(3)
    target = target.masked_fill(target < target.topk(2).values[:, -1:], 0.0)
    target = target / target.sum(-1, keepdim=True)
    assert p_value(accept_sampled, target, transitions(7), 2) > ENOUGH


def test_no_draft_at_all_is_sampling_from_the_target() -> None:
    target = transitions(4)
    last = torch.zeros(DRAWS, dtype=torch.int64)
    for q in (None, torch.zeros(DRAWS, 0, VOCAB)):
        verdict = accept_sampled(last[:, None][:, :0], q, target[last][:, None], rng())
        assert not verdict.n_accepted.any()
        assert chi_square_p_value(counted(verdict.next_token[:, None], VOCAB), target[0]) > ENOUGH


def shifted(by: int, what: str):
    """`accept_sampled` given p or q read at another place."""

    def rule(drafts, q, p, generator):
        late = [min(max(place + by, 0), p.shape[1] - 1) for place in range(p.shape[1])]
        if what == "p":
            return accept_sampled(drafts, q, p[:, late], generator)
        if what == "bonus":
            return accept_sampled(drafts, q, torch.cat((p[:, :-1], p[:, -1 + by : p.shape[1] + by]), 1), generator)
        return accept_sampled(drafts, q.roll(by, 1), p, generator)

    return rule


@pytest.mark.parametrize(("by", "what"), [(1, "p"), (-1, "p"), (-1, "bonus"), (1, "q")])
def test_the_proof_would_see_a_place_that_is_off_by_one(by: int, what: str) -> None:
    assert p_value(shifted(by, what), transitions(1), transitions(7), 2) < 1e-30


def test_the_share_of_accepted_drafts_is_the_sum_of_the_lesser() -> None:
    """And `acceptance` is 1 minus the total variation."""
    target, draft = transitions(5), transitions(6)
    last = torch.arange(VOCAB).repeat(DRAWS)
    drafts = torch.multinomial(draft[last], 1, generator=rng())
    verdict = accept_sampled(drafts, draft[last][:, None], target[last][:, None].expand(-1, 2, -1), rng(1))
    share = verdict.n_accepted.view(DRAWS, VOCAB).double().mean(0)
    expected = acceptance(target, draft).double()
    assert expected.min() < 0.8
    torch.testing.assert_close(share, expected, atol=4 * 0.5 / DRAWS**0.5, rtol=0)
    torch.testing.assert_close(acceptance(target, draft), 1 - (target - draft).abs().sum(-1) / 2)


def test_a_perfect_draft_is_accepted_whole() -> None:
    p = torch.randn(1000, 5, 50, generator=rng()).mul(3).softmax(-1)
    drafts = torch.multinomial(p[:, :4].reshape(-1, 50), 1, generator=rng()).view(1000, 4)
    assert bool((accept_sampled(drafts, p[:, :4].clone(), p, rng()).n_accepted == 4).all())


@pytest.mark.parametrize("k", [0, 1, 4])
def test_greedy_against_a_loop_over_rows(k: int) -> None:
    drafts = torch.randint(0, 2, (300, k), generator=rng(0))
    targets = torch.randint(0, 2, (300, k + 1), generator=rng(1))
    verdict = accept_greedy(drafts, targets)
    for row in range(300):
        n = 0
        while n < k and drafts[row, n] == targets[row, n]:
            n += 1
        assert verdict.n_accepted[row] == n and verdict.next_token[row] == targets[row, n]
    assert verdict.n_accepted.unique().tolist() == list(range(k + 1))


@pytest.mark.parametrize("points", [True, False])
def test_sampling_from_a_target_all_on_one_token_is_greedy(points: bool) -> None:
    drafts = torch.randint(0, 3, (400, 4), generator=rng(0))
    targets = torch.randint(0, 3, (400, 5), generator=rng(1))
    p = torch.nn.functional.one_hot(targets, 3).float()
    q = None if points else torch.full((400, 4, 3), 1 / 3)
    sampled, greedy = accept_sampled(drafts, q, p, rng()), accept_greedy(drafts, targets)
    assert torch.equal(sampled.n_accepted, greedy.n_accepted)
    assert torch.equal(sampled.next_token, greedy.next_token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_point_mass_spelled_out_gives_the_same_verdicts(dtype: torch.dtype) -> None:
    p = torch.randn(500, 4, 20, generator=rng(), dtype=dtype).softmax(-1)
    drafts = p[:, :3].argmax(-1)
    q = torch.nn.functional.one_hot(drafts, 20).to(dtype)
    told, not_told = accept_sampled(drafts, q, p, rng(5)), accept_sampled(drafts, None, p, rng(5))
    assert torch.equal(told.n_accepted, not_told.n_accepted) and told.n_accepted.unique().numel() > 2
    assert torch.equal(told.next_token, not_told.next_token)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("points", [True, False])
def test_a_token_of_probability_zero_is_never_emitted(monkeypatch, uniform: float, points: bool) -> None:
    """Not for the smallest random number, nor for the largest; drafted or not."""
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: torch.full(shape, uniform, dtype=dtype))
    p = torch.tensor([0.0, 0.0, 0.7, 0.3, 0.0, 0.0]).expand(6, 2, 6)
    drafts = torch.arange(6)[:, None]
    verdict = accept_sampled(drafts, None if points else torch.full((6, 1, 6), 1 / 6), p, rng())
    accepted = verdict.n_accepted.bool()
    assert not accepted[[0, 1, 4, 5]].any()
    assert bool(((verdict.next_token == 2) | (verdict.next_token == 3)).all())
    if uniform == 0:
        assert accepted[[2, 3]].all()


def test_a_token_that_the_draft_gives_nothing() -> None:
    """It cannot come from q. p/q is without bound where p gives it anything; where p does not, it is refused."""
    p = torch.tensor([0.5, 0.0, 0.5]).expand(1000, 2, 3)
    q = torch.tensor([0.0, 0.0, 1.0]).expand(1000, 1, 3)
    certain = accept_sampled(torch.zeros(1000, 1, dtype=torch.int64), q, p, rng())
    assert bool(certain.n_accepted.all())
    never = accept_sampled(torch.ones(1000, 1, dtype=torch.int64), q, p, rng())
    assert not never.n_accepted.any() and not (never.next_token == 1).any()


def test_residual() -> None:
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.5, 0.2, 0.3])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.0, 1.0, 0.0]))
    p, q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4]]), torch.tensor([[0.2, 0.2, 0.6], [0.6, 0.3, 0.1]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.75, 0.25, 0.0], [0.0, 0.25, 0.75]]))
    assert residual(p.double(), q.double()).dtype == torch.float64


def test_the_residual_of_equal_distributions_is_the_target(monkeypatch) -> None:
    p = torch.randn(5, 100, generator=rng()).softmax(-1)
    torch.testing.assert_close(residual(p, p), p, atol=0, rtol=0)
    # By rounding q may lie above p everywhere; a token that is refused even so is drawn from p.
    above = p * (1 + 1e-6)
    torch.testing.assert_close(residual(p, above), p, atol=0, rtol=0)
    monkeypatch.setattr("labkit.speculative.acceptance._OFF_ONE", 2.0)  # more than rounding, to see it often
    wide = p[:1].expand(50_000, 2, 100)
    drafts = torch.zeros(50_000, 1, dtype=torch.int64)
    verdict = accept_sampled(drafts, wide[:, :1] * 2, wide, rng())
    refused = verdict.next_token[verdict.n_accepted == 0]
    assert 20_000 < len(refused) < 30_000
    assert chi_square_p_value(counted(refused[:, None], 100), p[0]) > ENOUGH


def test_the_last_of_many_tokens_are_drawn_as_often_as_they_should(monkeypatch) -> None:
    """Each is rarer than what float32 can add to the sum of those before; in float32 most would never come up."""
    vocab, rows = 49152, 48
    p = torch.full((vocab,), 2.0**-30)
    p[0] = 1 - p[1:].double().sum().float()
    places = torch.linspace(1, vocab - 1, rows).long()
    sums = p.double().cumsum(0)
    uniform = ((sums[places] + sums[places - 1]) / 2 / sums[-1])[:, None]
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: uniform)
    verdict = accept_sampled(torch.zeros(rows, 0, dtype=torch.int64), None, p.expand(rows, 1, vocab), rng())
    assert torch.equal(verdict.next_token, places)


def test_float64_goes_through_and_both_may_be_mixed() -> None:
    """A mass that float32 would round to the target's own is still refused."""
    p = torch.tensor([0.5, 0.5], dtype=torch.float64).expand(20_000, 2, 2)
    drafts = torch.zeros(20_000, 1, dtype=torch.int64)
    for q in (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0], dtype=torch.float64)):
        verdict = accept_sampled(drafts, q.expand(20_000, 1, 2), p, rng())
        assert 9_000 < int(verdict.n_accepted.sum()) < 11_000
        assert bool((verdict.next_token[verdict.n_accepted == 0] == 1).all())
        mixed = accept_sampled(drafts, q.expand(20_000, 1, 2), p.float(), rng())
        assert torch.equal(mixed.n_accepted, verdict.n_accepted)


def test_a_seed_repeats_the_verdicts() -> None:
    p = torch.randn(200, 4, 30, generator=rng()).softmax(-1)
    drafts = torch.randint(0, 30, (200, 3), generator=rng())
    first, again, other = (accept_sampled(drafts, p[:, :3], p.roll(1, 2), rng(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.n_accepted, again.n_accepted) and torch.equal(first.next_token, again.next_token)
    assert not torch.equal(first.next_token, other.next_token)


IDS, P, Q = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 4, 5), 0.2), torch.full((2, 3, 5), 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS, Q, P[:, :3], rng()), "p: got .shape"),
        ((IDS, Q[:, :2], P, rng()), "q: got .shape"),
        ((IDS, Q[..., :4], P, rng()), "q: got .shape"),
        ((IDS.float(), Q, P, rng()), "drafts: got"),
        ((IDS + 5, Q, P, rng()), "drafts: got 'ids 5 to 5'; takes 0 to 4"),
        ((IDS - 1, None, P, rng()), "drafts: got 'ids -1"),
        ((IDS, Q, P.bfloat16(), rng()), "p: got"),
        ((IDS, Q, P, None), "generator: got"),
        ((IDS, Q, P * torch.nan, rng()), "p: got 'probabilities that do not sum to 1"),
        ((IDS, None, P * 0, rng()), "p: got 'probabilities that do not sum to 1"),
        ((IDS, Q, P * 7, rng()), "p: got 'probabilities that do not sum to 1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accept_sampled(*arguments)


def test_greedy_refuses_targets_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"targets: got 'shape \(2, 3\)'; takes \(2, 4\)"):
        accept_greedy(IDS, IDS)


@pytest.mark.parametrize("wrong", [0.0, 2.0, float("nan"), float("inf"), -1.0])
def test_a_q_that_is_no_distribution_is_refused(wrong):
    p = torch.full((1, 2, 4), 0.25)
    q = torch.full((1, 1, 4), 0.25 * wrong if wrong >= 0 else 0.75)
    if wrong < 0:
        q[0, 0, 0] = -1.25
    with pytest.raises(ValueError, match="q: got"):
        accept_sampled(torch.tensor([[1]]), q, p, torch.Generator())
