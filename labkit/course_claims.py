"""The claims of the whole course in one table, filled from the ledger."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

import psutil
import torch

from labkit import _check
from labkit._claim_ledger import figures_in
from labkit._table import readable
from labkit.claims import NOT_MEASURED, ClaimRow, ClaimsTable, load_claims, row_of
from labkit.measure import Label, Ledger, Measurement, device_name

# Columns of the short form: the claim, its figures, the verdict; 110 with the gaps between them.
_WIDTHS = (54, 35, 17)
_GAP = "  "
_WIDTH = sum(_WIDTHS) + len(_GAP) * (len(_WIDTHS) - 1)
VERDICTS = ("holds", "does not hold", "holds only when", NOT_MEASURED)


def _kind(row: ClaimRow) -> str:
    """The verdict without its conditions."""
    return row.verdict.partition(":")[0]


def _without_figures(row: ClaimRow, measured: bool) -> str:
    """Where a figure could come from; `measured`: whether its chapter has left any."""
    chapter = f"chapter {row.claim.chapter:02d}"
    return f"{chapter} ran, and left it open" if measured else f"{chapter} measures it"


def _short_figure(row: ClaimRow) -> str:
    """The figure, or how far the figures reach; with the label of each kind among them."""
    values = [figure.value for figure in row.figures.values()]
    labels = "/".join(sorted({str(figure.label) for figure in row.figures.values()}))
    ends = [readable(value, row.claim.unit) for value in (min(values), max(values))]
    reach = ends[0] if ends[0] == ends[1] else " to ".join(ends)
    return f"{reach} {labels}"


def _short(row: ClaimRow, measured: bool) -> Iterator[str]:
    """A row's lines; under which conditions it holds, where it does so under some, on lines of its own."""
    figure = _short_figure(row) if row.figures else _without_figures(row, measured)
    yield from _in_columns((row.claim.claim, figure, _kind(row)))
    conditions = row.verdict.partition(": ")[2]
    if conditions:
        yield from textwrap.wrap(f"only when: {conditions}", _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _in_columns(cells: tuple[str, str, str]) -> Iterator[str]:
    """Lines of text, each cell broken within its own column."""
    columns = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)]
    for i in range(max(map(len, columns))):
        parts = (column[i] if i < len(column) else "" for column in columns)
        yield _GAP.join(part.ljust(width) for part, width in zip(parts, _WIDTHS, strict=True)).rstrip()


@dataclass(frozen=True)
class CourseClaims:
    """Every claim of the course with the newest figures that the ledger has for it, by chapter.

    As text a short form, a claim with its figures and verdict; as HTML the table that each chapter shows, literature
    included.
    """

    rows: tuple[ClaimRow, ...]

    def __str__(self) -> str:
        lines = list(_in_columns(("claim", "here", "verdict")))
        for chapter, rows in self.by_chapter().items():
            lines += ["", f"Chapter {chapter:02d}"]
            ran = any(row.figures for row in rows)
            for row in rows:
                lines += _short(row, ran)
        return "\n".join([*lines, "", *textwrap.wrap(self.summary(), _WIDTH)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = []
        for chapter, rows in self.by_chapter().items():
            parts += [f"<h4>Chapter {chapter:02d}</h4>", ClaimsTable(rows)._repr_html_()]
        return "\n".join([*parts, f"<p>{html.escape(self.summary())}</p>"])

    def by_chapter(self) -> dict[int, tuple[ClaimRow, ...]]:
        """The rows of each chapter."""
        groups = groupby(self.rows, key=lambda row: row.claim.chapter)
        return {chapter: tuple(rows) for chapter, rows in groups}

    def counts(self) -> dict[str, int]:
        """How many claims came to each verdict, all of `VERDICTS` in their order."""
        found = Counter(map(_kind, self.rows))
        return {kind: found[kind] for kind in VERDICTS}

    def open_chapters(self) -> list[int]:
        """Chapters of which the ledger has no figure at all."""
        return [n for n, rows in self.by_chapter().items() if not any(row.figures for row in rows)]

    def summary(self) -> str:
        """How many claims came to which verdict, what is still to be run, and what the figures were measured on."""
        said = ", ".join(f"{kind} {count}" for kind, count in self.counts().items())
        text = f"{len(self.rows)} claims: {said}."
        if todo := self.open_chapters():
            text += f" The ledger has no figures yet of chapter {', '.join(f'{n:02d}' for n in todo)}."
        labels = (Label.MEASURED, Label.RECORDED)
        measured = [f for row in self.rows for f in row.figures.values() if f.label in labels]
        if measured:
            machines = sorted({figure.device or "a device not named" for figure in measured})
            text += f" Measured on {', '.join(machines)}, {_days(measured)}."
        return text


def _days(figures: list[Measurement]) -> str:
    """The first and the last day."""
    times = [figure.time for figure in figures if figure.time]
    if not times:
        return "on a day not named"
    first, last = (f"{datetime.fromtimestamp(time):%Y-%m-%d}" for time in (min(times), max(times)))
    return first if first == last else f"{first} to {last}"


def course_claims(ledger: Ledger | None = None) -> CourseClaims:
    """Every claim of the course beside the newest figures that `ledger` (None: the usual one) has for it.

    A chapter leaves its figures there when it shows its own table. A claim without any says which chapter measures it;
    a figure in another unit than its claim's, left by an older version, counts for none. Errors: ValueError for
    something else than a Ledger.
    """
    ledger = Ledger() if ledger is None else ledger
    _check.require(isinstance(ledger, Ledger), "ledger", ledger, "a Ledger, or None")
    claims = load_claims()
    found = figures_in(ledger, {claim.id: claim.unit for claim in claims})
    return CourseClaims(tuple(row_of(claim, _as_of_now(found.get(claim.id, {}))) for claim in claims))


def _as_of_now(figures: Mapping[str, Measurement]) -> dict[str, Measurement]:
    """MEASURED is what ran just now, here: a line of an earlier process, or of another device, is a record of it."""
    begun, here = psutil.Process().create_time(), {device_name("cpu")}
    if torch.cuda.is_available():
        here.add(device_name("cuda"))
    return {
        condition: replace(figure, label=Label.RECORDED)
        if figure.label is Label.MEASURED and not (figure.time >= begun and figure.device in here)
        else figure
        for condition, figure in figures.items()
    }
