"""What a lab's `compute` yields, and the forms in which a result leaves the lab. No widgets here."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from labkit._table import SECONDS, SI, scaled
from labkit.measure import Measurement


@dataclass(frozen=True)
class Progress:
    """What `compute` is doing now; `fraction` is how far it is, from 0 to 1, or None when that is not known."""

    text: str
    fraction: float | None = None


@dataclass(frozen=True)
class Number:
    """One figure of a result as a learner reads it.

    `key` and `exact` are for whoever checks the lab by machine: the name, and the value before rounding.
    """

    key: str
    label: str
    text: str
    exact: float
    group: str = ""
    note: str = ""


class LabResult(Protocol):
    """A complete result. `compute` may yield several for one setting, each firmer than the one before."""

    def numbers(self) -> list[Number]:
        """The few figures shown above the figure, in order, grouped by `Number.group`."""

    def text(self) -> str:
        """The whole result as plain text: what a printout shows in place of the widget."""

    def rows(self) -> list[dict[str, object]]:
        """The whole result as table rows, parameters included: what Export CSV writes."""

    def measurements(self) -> list[Measurement]:
        """What goes to the ledger once the result is final, parameters included."""


Compute = Callable[[object, Callable[[], bool]], Iterator["Progress | LabResult"]]


def to_csv(results: Iterable[LabResult]) -> str:
    """All results as one CSV table; columns are the union of what the rows have, in order of appearance."""
    rows: list[Mapping[str, object]] = [row for result in results for row in result.rows()]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def si(value: float, unit: str, digits: int = 3) -> str:
    """`value` with a decimal prefix and `digits` significant digits: si(5898240, "B") is "5.90 MB"."""
    number, prefix = scaled(value, SI, digits)
    return f"{_significant(number, digits)} {prefix}{unit}"


def duration(seconds: float) -> str:
    """`seconds` in s, ms or µs with three significant digits."""
    number, unit = scaled(seconds, SECONDS[:3])
    return f"{_significant(number, 3)} {unit}"


def threads_text(threads: int | None) -> str:
    """As a lab's text form says it after its device; nothing where no threads are counted."""
    return f", {threads} CPU thread{'s' * (threads != 1)}" if threads else ""


def _significant(value: float, digits: int) -> str:
    """`value` rounded to `digits` significant digits, without an exponent and with trailing zeros kept."""
    if value == 0:
        return "0"
    exponent = int(f"{abs(value):.{digits - 1}e}".split("e")[1])
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"
