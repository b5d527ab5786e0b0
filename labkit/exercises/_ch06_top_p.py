"""Exercise `top_p_filter`: the fewest tokens whose probabilities reach top_p, and nothing else.

Holtzman et al. 2020, section 3.1. Compared with a plain loop over each row, in float64.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.exercises._ch06_reference import own
from labkit.exercises._exercise import Answer, Exercise, expect
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "top_p_filter(probs, top_p) -> probabilities of the same shape"
_TOLERANCE = 1e-5
# How many of a row's probabilities, the largest first, are kept.
Keep = Callable[[list[float], float], int]


def _fewest(ordered: list[float], top_p: float) -> int:
    """The fewest whose sum reaches top_p; all where rounding keeps the sum below it."""
    total = 0.0
    for count, value in enumerate(ordered, 1):
        total += value
        if total >= top_p:
            return count
    return len(ordered)


def _filtered(probs: Tensor, top_p: float, keep: Keep = _fewest, renormalise: bool = True) -> Tensor:
    rows = []
    for row in probs.double().reshape(-1, probs.shape[-1]):
        ordered, order = row.sort(descending=True, stable=True)
        kept = torch.zeros_like(row)
        chosen = order[: keep(ordered.tolist(), top_p)]
        kept[chosen] = row[chosen]
        rows.append(kept / kept.sum() if renormalise and kept.sum() > 0 else kept)
    return torch.stack(rows).reshape(probs.shape)


def _without_crossing(ordered: list[float], top_p: float) -> int:
    """Those whose sum stays within top_p."""
    return sum(total <= top_p for total in torch.tensor(ordered, dtype=torch.float64).cumsum(0).tolist())


def _in_sorted_order(probs: Tensor, top_p: float) -> Tensor:
    return _filtered(probs, top_p).sort(-1, descending=True).values


def _softmaxed(probs: Tensor, top_p: float) -> Tensor:
    kept = _filtered(probs, top_p, renormalise=False)
    return kept.masked_fill(kept == 0, -torch.inf).softmax(-1)


_MISTAKES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "what is kept should sum to 1 again": lambda x, p: _filtered(x, p, renormalise=False),
    "the token with which the sum reaches top_p is kept, too": lambda x, p: _filtered(x, p, _without_crossing),
    "the token with which the sum reaches top_p is the last; this keeps one more": lambda x, p: _filtered(
        x, p, lambda ordered, top_p: _fewest(ordered, top_p) + 1
    ),
    "a sum that is exactly top_p has reached it": lambda x, p: _filtered(
        x, p, lambda ordered, top_p: min(len(ordered), 1 + _without_crossing(ordered, top_p))
    ),
    "the probabilities come back in sorted order: each belongs to its token": _in_sorted_order,
    "this compares each token with top_p, and asked is the sum of the largest": lambda x, p: _filtered(
        x, p, lambda ordered, top_p: max(1, sum(value >= 1 - top_p for value in ordered))
    ),
    "a share of the largest probability is another filter, min-p": lambda x, p: _filtered(
        x, p, lambda ordered, top_p: sum(value >= top_p * ordered[0] for value in ordered)
    ),
    "this keeps the same number of tokens in each row; each row has its own sum": lambda x, p: _filtered(
        x, p, lambda ordered, top_p: _fewest(x.double().reshape(-1, x.shape[-1])[0].sort(descending=True)[0].tolist(),
                                             top_p)
    ),
    "these are probabilities already: divide by their sum, without a softmax": _softmaxed,
    "the most likely come first: sort them descending": lambda x, p: _from_the_least(x, p),
    "this leaves everything as it was": lambda x, p: x.double(),
}  # fmt: skip


def _from_the_least(probs: Tensor, top_p: float) -> Tensor:
    kept = torch.zeros_like(probs, dtype=torch.float64)
    ordered, order = probs.double().sort(-1)
    kept.scatter_(-1, order, ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0))
    return kept / kept.sum(-1, keepdim=True)


Case = tuple[str, Tensor, float]


def _cases() -> list[Case]:
    halves = torch.tensor([0.125, 0.5, 0.0, 0.25, 0.125])
    two = torch.stack((halves, torch.tensor([0.9375, 0.0, 0.0625, 0.0, 0.0])))
    sharp = torch.tensor([0.01, 0.97, 0.01, 0.01])
    cases = [(f"{halves.tolist()} at {p}", halves, p) for p in (0.6, 0.75, 0.3, 0.5, 1.0)]
    cases += [(f"{two.tolist()} at {p}", two, p) for p in (0.75, 0.5, 0.9)]
    cases += [(f"{sharp.tolist()} at {p}", sharp, p) for p in (0.1, 0.5, 1e-9)]
    for seed, shape in enumerate(((40,), (6, 30), (2, 3, 50), (1, 1), (3, 500))):
        probs = (2.5 * normal(seed, *shape)).softmax(-1)
        cases += [(f"random probabilities of the shape {shape} at {p}", probs, p) for p in (0.13, 0.55, 0.9)]
    return cases


def _run(answer: Answer, case: Case) -> Tensor:
    what, probs, top_p = case
    given = probs.clone()
    value = own(lambda: answer(given, top_p))
    expect(torch.equal(given, probs), "what you were given should stay as it is: your function changed it in place")
    return as_tensor(value, tuple(probs.shape), f"the result for {what}")


def _close(a: Tensor, b: Tensor) -> bool:
    """The same, token for token; what is kept is 0 in neither."""
    return torch.allclose(a, b, rtol=_TOLERANCE, atol=1e-9) and torch.equal(a == 0, b == 0)


def _test_ties(answer: Answer) -> None:
    """Of equally likely tokens any may be kept, but no more of them than are needed."""
    for count, top_p, wanted in ((8, 0.5, 4), (8, 0.55, 5), (4, 0.75, 3)):
        found = _run(answer, (f"{count} equal probabilities at {top_p}", torch.full((count,), 1 / count), top_p))
        kept = int((found > 0).sum())
        told = f"{count} equal probabilities at top_p {top_p}: {wanted} of them are enough; yours keeps {kept}"
        expect(kept == wanted, told)
        expect(_close(found[found > 0], torch.full((kept,), 1 / kept).double()), f"{told}, and they should be equal")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    found = [_run(answer, case) for case in cases]
    right = [_filtered(probs, top_p) for _, probs, top_p in cases]
    for i, (what, probs, _) in enumerate(cases):
        if _close(found[i], right[i]):
            continue
        why = (
            f": {text}"
            for text, rule in _MISTAKES.items()
            if all(_close(f, rule(x, p)) for f, (_, x, p) in zip(found, cases, strict=True))
        )
        kept, wanted = (int((x > 0).sum()) for x in (found[i], right[i]))
        counts = f"{wanted} of {probs.numel()} are kept; yours keeps {kept}, with a sum of {float(found[i].sum()):.4g}"
        expect(False, f"{what}: {counts}{next(why, '')}")
    _test_ties(answer)
    return f"the fewest tokens that reach top_p, each in its place, in all {len(cases)} cases"


TOP_P_FILTER = Exercise(
    name="top_p_filter",
    chapter=6,
    task="Keep the fewest tokens whose probabilities reach top_p, in each row, and make them sum to 1 again.",
    signature=_SIGNATURE,
    hints=(
        "Sort a row from the largest down and add up. Which is the first token that is no longer needed?",
        "A token goes when those before it have reached top_p: cumsum - ordered >= top_p. What you know in sorted "
        "order has to go back to where the tokens stand.",
        "ordered, order = probs.sort(-1, descending=True); gone = ordered.cumsum(-1) - ordered >= top_p; kept = "
        "probs.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), 0); return kept / kept.sum(-1, "
        "keepdim=True).",
    ),
    test=_test,
)
