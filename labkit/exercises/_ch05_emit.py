"""Exercise `emit`: accept or draw again, so that what comes out has the target's distribution.

Leviathan et al. 2023, appendix A.1. Tested by a chi-square test on many draws.
"""

import torch
from torch import Tensor

from labkit.exercises._ch05_reference import call_with_copies, distributions, improbable, in_words
from labkit.exercises._exercise import Answer, Exercise, expect

_SIGNATURE = "emit(drafts, q, p, generator) -> tokens, one for each draft"
_DRAWS = 10_000


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _run(answer: Answer, q: Tensor, p: Tensor, seed: int, other: int | None = None) -> tuple[Tensor, Tensor]:
    """The drafts and what was made of them, both (draws,); `other`: the seed of the function's own generator."""
    drafts = torch.multinomial(q, _DRAWS, replacement=True, generator=_generator(seed))
    value = call_with_copies(answer, drafts, q, p, _generator(seed + 1 if other is None else other))
    expect(isinstance(value, Tensor), f"return a tensor with a token for each draft; got {type(value).__name__}")
    shape = tuple(value.shape)
    expect(shape == (_DRAWS,), f"there are {_DRAWS:,} drafts, and each becomes one token; got the shape {shape}")
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    expect(whole, f"tokens are whole numbers; got {value.dtype}")
    inside = bool(((value >= 0) & (value < len(p))).all())
    expect(inside, f"tokens are numbers from 0 to {len(p) - 1}, places in p; got others")
    return drafts, value.long()


def _why(q: Tensor, p: Tensor, counts: Tensor) -> str:
    """What was probably done, from what comes out."""
    lost = 1 - torch.minimum(p, q).sum()
    by_p = (q * p).sum()
    over = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    mistakes = {
        "this is q: the drafts come out as they are": q,
        "after a rejection you seem to draw from p; draw from what is left over, norm(max(0, p - q))": (
            torch.minimum(p, q) + lost * p
        ),
        "after a rejection you seem to draw from q again": torch.minimum(p, q) + lost * q,
        "you seem to accept with p alone; q, which the token was drawn with, belongs below it": (
            q * p + (1 - by_p) * over
        ),
        "you seem to accept with p alone and to draw from p after that": q * p + (1 - by_p) * p,
    }
    fitting = [text for text, wrong in mistakes.items() if not improbable(counts, wrong)]
    return f": {fitting[0]}" if fitting else ""


def _test_distribution(answer: Answer, q: Tensor, p: Tensor, seed: int) -> None:
    """What comes out is distributed as p, and as many drafts are kept as can be."""
    drafts, tokens = _run(answer, q, p, seed)
    counts = torch.bincount(tokens, minlength=len(p))
    impossible = int(counts[p == 0].sum())
    expect(impossible == 0, f"{impossible} tokens came out that the target never gives (their p is 0)")
    shares = counts / _DRAWS
    told = f"p is {in_words(p)}, and what comes out is {in_words(shares)}"
    wrong = improbable(counts, p)
    expect(not wrong, told + (_why(q, p, counts) if wrong else ""))
    kept, most = int((drafts == tokens).sum()), torch.minimum(p, q).sum()
    told = f"what comes out has the distribution p, but {kept / _DRAWS:.1%} of the drafts were kept, and sum min(p, q)"
    off = improbable(torch.tensor([kept, _DRAWS - kept]), torch.stack((most, 1 - most)).clamp(min=0))
    expect(not off, f"{told} is {float(most):.1%}: accept each draft with probability min(1, p/q)")


def _test_twin(answer: Answer) -> None:
    """A draft that is the target: everything is kept."""
    p = distributions(5, 6)
    drafts, tokens = _run(answer, p, p.clone(), 50)
    told = "where q equals p every draft should be kept; yours changed"
    expect(torch.equal(drafts, tokens), f"{told} {int((drafts != tokens).sum()):,} of {_DRAWS:,}")


def _test_generator(answer: Answer) -> None:
    """The same seed gives the same tokens for the same drafts, another seed others."""
    q, p = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.2, 0.2, 0.3, 0.3])
    first, again, other = (_run(answer, q, p, 70, seed)[1] for seed in (71, 71, 90))
    told = "the same generator gave other tokens the second time: draw every number with generator=generator"
    expect(torch.equal(first, again), told)
    expect(not torch.equal(first, other), "another generator gave the same tokens: draw with generator=generator")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    one, two = torch.tensor([0.1, 0.6, 0.3, 0.0]), torch.tensor([0.5, 0.2, 0.2, 0.1])
    sure = torch.tensor([0.0, 0.0, 1.0, 0.0])
    falling = torch.tensor([0.4, 0.3, 0.2, 0.1])
    pairs = ((falling.flip(0), falling), (two, one), (one, two), (sure, two))
    for seed, (q, p) in enumerate((*pairs, (distributions(1, 9), distributions(2, 9)))):
        _test_distribution(answer, q, p, 10 + 10 * seed)
    _test_twin(answer)
    _test_generator(answer)
    return f"{_DRAWS:,} tokens do not tell what comes out from the target's own; and as many drafts are kept as can be"


EMIT = Exercise(
    name="emit",
    chapter=5,
    task="One token for each draft: the draft itself where it is accepted, one from the residual where not, so that "
    "what comes out has the target's distribution.",
    signature=_SIGNATURE,
    hints=(
        "Draft x comes with probability q(x) and is kept with min(1, p(x)/q(x)). With what probability does x come out "
        "that way, and what is missing to p(x)?",
        "torch.rand(len(drafts), generator=generator) < p[drafts] / q[drafts] says which are kept. The others are "
        "replaced by draws from norm(max(0, p - q)), the same distribution for all of them.",
        "tokens = torch.where(kept, drafts, torch.multinomial(left, len(drafts), replacement=True, "
        "generator=generator)), where left = (p - q).clamp(min=0), or p where that is all 0.",
    ),
    test=_test,
)
