"""Two accept rules that are seen in the wild and are wrong, and how wrong: their output's distance from the target's.

They differ from `accept_sampled` in the probability of accepting alone; the residual and the bonus are the right ones,
so that the bias is that of the mistake by itself. q is the draft's distribution, p the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from labkit import _check
from labkit.speculative.acceptance import Drafted, Verdict, accept_sampled, residual

# Put under the fraction to guard it against 0, it hides that the fraction is 1.
_EPSILON = 1e-10


def _right(p_x: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
    """min(1, p/q); 1 where q is 0 and p is not, 0 where both are."""
    return torch.where(p_x >= q_x, (p_x > 0).to(p_x.dtype), p_x / q_x)


def _p_alone(p_x: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
    return p_x


def _p_over_itself(p_x: torch.Tensor, q_x: torch.Tensor) -> torch.Tensor:
    return p_x / (p_x + _EPSILON)


def accept_with_p_alone(
    drafts: torch.Tensor, q: torch.Tensor | None, p: torch.Tensor, generator: torch.Generator
) -> Verdict:
    """Wrong: accepts x with p(x), and forgets q. A token is emitted with q(x) p(x) where min(q(x), p(x)) is due: too
    rarely, and the residual, drawn from too often, does not make up for it. Right only where q is a point mass (q
    None). Arguments and errors as `accept_sampled`."""
    drafted = Drafted.of(drafts, q, p, generator)
    return drafted.verdict(drafted.uniform[:, :-1] < _p_alone(drafted.p_x, drafted.q_x))


def accept_p_over_itself(
    drafts: torch.Tensor, q: torch.Tensor | None, p: torch.Tensor, generator: torch.Generator
) -> Verdict:
    """Wrong: accepts x with p(x) / (p(x) + ε), where q(x) belongs below: nearly always, so that what comes out is the
    draft's distribution. Its rate of acceptance looks splendid. Arguments and errors as `accept_sampled`."""
    drafted = Drafted.of(drafts, q, p, generator)
    return drafted.verdict(drafted.uniform[:, :-1] < _p_over_itself(drafted.p_x, drafted.q_x))


Rule = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Generator], Verdict]

_CHANCES: Mapping[Rule, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    accept_sampled: _right,
    accept_with_p_alone: _p_alone,
    accept_p_over_itself: _p_over_itself,
}


def accept_chances(rule: Rule, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The probability `(vocab,)`, float64, that `rule` accepts each token, were it drafted; `p`, `q` `(vocab,)`."""
    _check.require(rule in _CHANCES, "rule", rule, f"one of {', '.join(known.__name__ for known in _CHANCES)}")
    for name, values in (("p", p), ("q", q)):
        _check.tensor(name, values, ndim=1, dtypes=(torch.float32, torch.float64))
        ok = values.shape == p.shape and bool((values >= 0).all()) and abs(float(values.double().sum()) - 1) < 1e-4
        _check.require(ok, name, f"shape {tuple(values.shape)}, sum {float(values.sum())}", "a distribution (vocab,)")
    return _CHANCES[rule](p.double(), q.double())


def output_distribution(rule: Rule, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The exact distribution `(vocab,)`, float64, of the first token emitted after one drafted token.

    Over every token x that q may draft: with q(x), x itself where it is accepted, else a draw from the residual.
    `rule`: `accept_sampled` or one of the wrong ones; `p`, `q` `(vocab,)`.
    """
    kept = q.double() * accept_chances(rule, p, q)
    return kept + (q.double().sum() - kept.sum()) * residual(p.double(), q.double())


def total_variation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Half the sum of |a - b| over the last dimension of two distributions `(vocab,)`: the largest difference in the
    probability of any event, 0 for the same and 1 for such as share no token."""
    for name, values in (("a", a), ("b", b)):
        _check.tensor(name, values, ndim=1)
    _check.require(a.shape == b.shape, "b", f"shape {tuple(b.shape)}", f"{tuple(a.shape)}, as a has")
    return float((a.double() - b.double()).abs().sum() / 2)
