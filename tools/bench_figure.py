"""One figure of `make bench`, and sides that take turns."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """One measured value beside its target, which is a least value (`at_least`) or a most. `values` are its samples."""

    name: str
    values: tuple[float, ...]
    unit: str
    target: float
    at_least: bool = False
    note: str = ""
    params: dict[str, object] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The median of the samples."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the median reaches the target."""
        return self.value >= self.target if self.at_least else self.value <= self.target


def take_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call the sides A B A B for `rounds` rounds and return what each gave; a round before them warms up."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            value = side()
            if turn:
                values[name].append(value)
    return values
