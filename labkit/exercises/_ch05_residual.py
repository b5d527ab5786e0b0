"""Exercise `residual`: what a token is drawn from after a rejection, norm(max(0, p - q)).

Leviathan et al. 2023, section 2.3.
"""

import torch
from torch import Tensor

from labkit.exercises._ch05_reference import call_with_copies, distributions, in_words
from labkit.exercises._exercise import Answer, Exercise, expect
from labkit.exercises._tensors import as_tensor

_SIGNATURE = "residual(p, q) -> distribution, in the shape of p"


def _norm(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _right(p: Tensor, q: Tensor) -> Tensor:
    """float64; p where nothing is left over."""
    over = (p.double() - q.double()).clamp(min=0)
    total = over.sum(-1, keepdim=True)
    return torch.where(total > 0, over / total, p.double())


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-5)


def _why(p: Tensor, q: Tensor, found: Tensor) -> str:
    """The usual mistake that gives this."""
    p, q = p.double(), q.double()
    over = (p - q).clamp(min=0)
    mistakes = {
        "it should sum to 1: divide by what is left over": over,
        "divide each row by its own sum, not by that of all rows": over / over.sum(),
        "this is left over from q: the token should make up for what the draft gives too seldom": _norm(
            (q - p).clamp(min=0)
        ),
        "where the draft gives too much, nothing is left: max(0, p - q), not its absolute value": _norm((p - q).abs()),
        "p - q is below 0 where the draft gives too much: cut it there": p - q,
        "these are already probabilities: a softmax of them gives weight to what should have none": over.softmax(-1),
        "a softmax of the difference gives weight to tokens that should have none": (p - q).softmax(-1),
        "this is p: drawn from it after a rejection, the output leans to what both models like": p,
        "this is q, the draft's": q,
        "the tokens that are left keep what p has over q, not p itself": _norm(p * (over > 0)),
    }
    return next((f": {text}" for text, wrong in mistakes.items() if _close(found, wrong)), "")


def _run(answer: Answer, p: Tensor, q: Tensor, what: str) -> Tensor:
    return as_tensor(call_with_copies(answer, p, q), tuple(p.shape), f"the residual {what}")


def _test_values(answer: Answer) -> None:
    """One distribution, a row for each place, and a batch of rows; what is left of each."""
    for seed, shape in ((0, (6,)), (10, (4, 6)), (20, (2, 3, 9)), (30, (1, 50))):
        p, q = distributions(seed, *shape), distributions(seed + 1, *shape)
        found, right = _run(answer, p, q, f"of shape {shape}"), _right(p, q)
        told = f"p and q of shape {shape}: it should be max(0, p - q), divided by its sum over the last dimension"
        expect(_close(found, right), told + ("" if _close(found, right) else _why(p, q, found)))


def _test_nearly_equal(answer: Answer) -> None:
    """Little is left over, and its sum is still 1."""
    p = torch.tensor([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25]])
    q = p + torch.tensor([2**-18, -(2**-18), 0.0])
    found = _run(answer, p, q, "where p and q nearly agree")
    told = f"where p and q differ by 4e-6, what is left should still sum to 1; yours sums to {in_words(found.sum(-1))}"
    expect(_close(found, _right(p, q)), told)


def _test_disjoint(answer: Answer) -> None:
    """A drafted token that the target never gives leaves p; one that the draft was sure of leaves the others."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.4, 0.2, 0.2, 0.2]])
    q = torch.tensor([[0.0, 0.0, 0.3, 0.7], [1.0, 0.0, 0.0, 0.0]])
    found = _run(answer, p, q, "of p and q with zeros")
    expect(_close(found[0], p[0].double()), "where p and q have no token in common, all of p is left")
    told = "where q is all on one token, what is left is p without that token, divided by its sum"
    expect(_close(found[1], _right(p, q)[1]), told)


def _test_equal(answer: Answer) -> None:
    """Rows where p is q, which leave nothing: p, as everything is accepted there but for rounding."""
    p, q = distributions(40, 4, 6), distributions(41, 4, 6)
    q[1], q[3] = p[1], p[3]
    for a, b, where in ((p, q, "in some rows"), (p, p, "in all rows"), (p[0], p[0], "of one distribution")):
        value = call_with_copies(answer, a, b)
        nan = int((~torch.isfinite(value)).sum()) if isinstance(value, Tensor) else 0
        expect(nan == 0, f"where p equals q {where}, nothing is left over, and 0/0 is not a number: return p there")
        found, equal = as_tensor(value, tuple(a.shape), "the residual"), (a == b).all(-1)
        expect(_close(found[equal], a[equal].double()), f"where p equals q {where}, return p")
        told = f"where p equals q {where}, the other rows should be as without them"
        expect(bool(equal.all()) or _close(found[~equal], _right(a, b)[~equal]), told)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_values(answer)
    _test_nearly_equal(answer)
    _test_disjoint(answer)
    _test_equal(answer)
    return "each row is what p has over q and sums to 1, however little that is; and p where nothing is left"


RESIDUAL = Exercise(
    name="residual",
    chapter=5,
    task="The distribution that a token is drawn from after a rejection: norm(max(0, p - q)).",
    signature=_SIGNATURE,
    hints=(
        "Accepted tokens give token x with probability min(p, q). What is missing to p, token by token?",
        "max(0, p - q), divided by its own sum in each row: sum(-1, keepdim=True). What if that sum is 0?",
        "over = (p - q).clamp(min=0); total = over.sum(-1, keepdim=True); return torch.where(total > 0, over / total, "
        "p).",
    ),
    test=_test,
)
