"""What chapter 05's checks share: distributions, a chi-square test, copies of what is given, and what may not be
called."""

from collections.abc import Callable

import torch
from torch import Tensor

from labkit.exercises._exercise import Answer, Failed, expect, without_labkit
from labkit.exercises._tensors import normal

# A right answer comes out so far off once in a million; each draws from generators with fixed seeds.
IMPROBABLE = 1e-6


def own(call: Callable[[], object]) -> object:
    """Call, and fail if labkit's or transformers' speculation ran."""
    return without_labkit(call, ("speculative/", "engine/"), ("generation",))


def distributions(seed: int, *shape: int, sharpness: float = 1.5) -> Tensor:
    """Random distributions over the last dimension, float32."""
    return (sharpness * normal(seed, *shape)).softmax(-1)


def improbable(counts: Tensor, probabilities: Tensor) -> bool:
    """Whether these counts of draws do not come from these probabilities, by Pearson's chi-square test.

    Both flat. What has no probability is left to the caller, who says so in words.
    """
    possible = probabilities > 0
    expected = probabilities[possible].double() * counts.sum()
    distance = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return bool(freedom > 0) and float(torch.special.gammaincc(freedom, distance / 2)) < IMPROBABLE


def call_with_copies(answer: Answer, *given: object) -> object:
    """The answer's value for copies of the tensors in `given`; fails if it changed one of them."""
    copies = [x.clone() if isinstance(x, Tensor) else x for x in given]
    value = own(lambda: answer(*copies))
    kept = all(torch.equal(a, b) for a, b in zip(given, copies, strict=True) if isinstance(a, Tensor))
    expect(kept, "what you were given should stay as it is: your function changed a tensor in place")
    return value


def as_count(value: object, most: int, what: str) -> int:
    """A whole number from 0 to `most`; one-element tensors will do."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise Failed(f"{what} should be a whole number; got a {type(value).__name__}") from None
    expect(number in range(most + 1), f"{what} should be a whole number from 0 to {most}; got {number:g}")
    return int(number)


def in_words(values: Tensor) -> str:
    """Numbers for a message."""
    return f"[{', '.join(f'{v:.3g}' for v in values.tolist())}]"
