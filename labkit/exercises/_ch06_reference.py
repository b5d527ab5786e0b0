"""What chapter 06's checks share: what may not be called, and the form of what comes back."""

from collections.abc import Callable

from labkit.exercises._exercise import Failed, near, without_labkit

_OWN = ("engine/", "speculative/", "labs/", "roofline", "sizing", "step_costs")


def own(call: Callable[[], object]) -> object:
    """Call, and fail if labkit's engine (its ladder, advisor, serving and sampling) or transformers' sampling ran."""
    return without_labkit(call, _OWN, ("generation",))


def as_numbers(value: object, count: int, what: str) -> tuple[float, ...]:
    """`count` numbers; one-element tensors will do for each."""
    try:
        numbers = tuple(float(x) for x in value)
    except (TypeError, ValueError, RuntimeError):
        raise Failed(f"{what} should be {count} numbers; got {value!r:.80}") from None
    if len(numbers) != count:
        raise Failed(f"{what} should be {count} numbers; got {len(numbers)}")
    return numbers


def all_near(found: list[float], wanted: list[float]) -> bool:
    """As many, and each near."""
    return len(found) == len(wanted) and all(near(a, b) or a == b for a, b in zip(found, wanted, strict=True))
