"""Folk claims about LLM inference beside the literature and what was measured here; and published figures.

A verdict is computed from the claim's rule and the figures given, never written down. One figure holds or does not;
several figures, each under a condition, can give "holds only when ...".
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from labkit import _check
from labkit._claim_ledger import keep_figures
from labkit._paths import DATA
from labkit._table import Table, readable
from labkit.measure import Label, Measurement

# One figure, or several by the condition under which each was taken.
Figures = Measurement | float | Mapping[str, Measurement | float]

NOT_MEASURED = "not measured here"
_COLUMNS = ("claim", "literature", "here", "verdict")
_RULES = ("within", "at_least", "at_most", "between")
_STATUSES = ("read", "second-hand", "inferred", "from memory", "derived", "recorded")


@dataclass(frozen=True)
class Literature:
    """What published sources say: in words, as one figure in the claim's unit where it is one, and how it was read."""

    text: str
    source: str
    status: str
    value: float | None = None

    def __post_init__(self) -> None:
        _check.choice("literature.status", self.status, _STATUSES)


@dataclass(frozen=True)
class Claim:
    """A row of `data/claims.yaml`, whose header says what each field means."""

    id: str
    chapter: int
    claim: str
    check: str
    quantity: str
    unit: str
    claimed: float | tuple[float, float]
    rule: str
    tolerance: float
    literature: Literature

    def __post_init__(self) -> None:
        _check.choice("rule", self.rule, _RULES)
        _check.number("tolerance", self.tolerance, 0.0, 1.0)
        pair = isinstance(self.claimed, tuple) and len(self.claimed) == 2 and self.claimed[0] <= self.claimed[1]
        takes = "[low, high] under the rule between, and one number under the others"
        _check.require(pair == (self.rule == "between"), "claimed", self.claimed, takes)

    def holds(self, value: float) -> bool:
        """Whether a figure in the claim's unit bears the claim out."""
        low, high = self.claimed if self.rule == "between" else (self.claimed, self.claimed)
        low, high = low - self.tolerance * abs(low), high + self.tolerance * abs(high)
        if self.rule == "at_least":
            return value >= low
        if self.rule == "at_most":
            return value <= high
        return low <= value <= high


def _read(path: Path, key: str) -> list[dict]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))[key]


@functools.cache
def _all_claims() -> tuple[Claim, ...]:
    claims = []
    for row in _read(DATA / "claims.yaml", "claims"):
        claimed = tuple(row["claimed"]) if isinstance(row["claimed"], list) else row["claimed"]
        claims.append(Claim(**(row | {"claimed": claimed, "literature": Literature(**row["literature"])})))
    return tuple(claims)


def load_claims(chapter: int | str | None = None) -> list[Claim]:
    """The claims of a chapter (1 or "01"), or all. Errors: ValueError for a chapter without claims."""
    if chapter is None:
        return list(_all_claims())
    chapters = sorted({c.chapter for c in _all_claims()})
    number = int(chapter) if isinstance(chapter, str) and chapter.isdecimal() else chapter
    known = type(number) is int and number in chapters
    _check.require(known, "chapter", chapter, f"one of {', '.join(map(str, chapters))}")
    return [c for c in _all_claims() if c.chapter == number]


def _by_condition(claim: Claim, measured: Figures | None) -> dict[str, Measurement | float]:
    """Figures by condition, "" for a lone one; units and types checked."""
    if measured is None:
        return {}
    figures = dict(measured) if isinstance(measured, Mapping) else {"": measured}
    for condition, figure in figures.items():
        _check.require(isinstance(condition, str), f"measured[{claim.id!r}]", condition, "conditions in words")
        name = f"measured[{claim.id!r}]" + (f"[{condition!r}]" if condition else "")
        if isinstance(figure, Measurement):
            _check.require(figure.unit == claim.unit, name, f"a figure in {figure.unit}", f"one in {claim.unit}")
        else:
            _check.number(name, figure)
    return figures


def _value(figure: Measurement | float) -> float:
    return figure.value if isinstance(figure, Measurement) else float(figure)


def verdict(claim: Claim, measured: Figures | None) -> str:
    """ "holds", "does not hold", "holds only when ..." (some of several conditions) or "not measured here".

    measured: a figure in the claim's unit, or figures by condition, such as {"batch 1": 0.56, "batch 2": 0.72}.
    Errors: ValueError for a Measurement in another unit, or a figure that is no number.
    """
    _check.require(isinstance(claim, Claim), "claim", claim, "a Claim, as load_claims returns")
    figures = _by_condition(claim, measured)
    if not figures:
        return NOT_MEASURED
    bearing_out = [condition for condition, figure in figures.items() if claim.holds(_value(figure))]
    if len(bearing_out) == len(figures):
        return "holds"
    return f"holds only when: {'; '.join(bearing_out)}" if bearing_out else "does not hold"


def _described(claim: Claim, condition: str, figure: Measurement | float) -> str:
    """A bare number is a formula's result; only what ran carries a Measurement, with its own label."""
    label = figure.label if isinstance(figure, Measurement) else Label.MODELLED
    text = f"{readable(_value(figure), claim.unit)} {label}"
    return f"{condition}: {text}" if condition else text


def _claimed(claim: Claim) -> str:
    if isinstance(claim.claimed, tuple):
        return " to ".join(readable(end, claim.unit) for end in claim.claimed)
    words = {"at_least": "at least ", "at_most": "at most "}
    return words.get(claim.rule, "") + readable(claim.claimed, claim.unit)


@dataclass(frozen=True)
class ClaimRow:
    """A claim, the figures for it by condition, and the verdict that they give."""

    claim: Claim
    figures: dict[str, Measurement | float]
    verdict: str

    def cells(self) -> tuple[str, ...]:
        """Claim, literature, measured, verdict, as text."""
        claim, literature = self.claim, self.claim.literature
        measured = "\n".join(_described(claim, *pair) for pair in self.figures.items())
        return (
            f"{claim.claim}\nclaimed: {_claimed(claim)}",
            f"{literature.text}\n{Label.PUBLISHED}: {literature.source} ({literature.status})",
            f"{claim.quantity}:\n{measured}" if measured else claim.check,
            self.verdict,
        )


def _block(cells: tuple[str, ...]) -> str:
    """Cells one under another: a terminal is too narrow for four columns of sentences."""
    width = max(map(len, _COLUMNS))
    texts = (cell.replace("\n", "\n" + " " * (width + 2)) for cell in cells)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in zip(_COLUMNS, texts, strict=True))


@dataclass(frozen=True)
class ClaimsTable:
    """The claims of a chapter, as blocks of text or as an HTML table."""

    rows: tuple[ClaimRow, ...]

    def __str__(self) -> str:
        return "\n\n".join(_block(row.cells()) for row in self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return Table(_COLUMNS, tuple(row.cells() for row in self.rows)).html()


def row_of(claim: Claim, measured: Figures | None) -> ClaimRow:
    """A claim with its figures and their verdict. Errors: as `verdict`."""
    return ClaimRow(claim, _by_condition(claim, measured), verdict(claim, measured))


def claims_table(chapter: int | str, measured: Mapping[str, Figures]) -> ClaimsTable:
    """Every claim of a chapter beside the literature, what was measured (by claim id) and the verdict.

    Errors: ValueError for an id that is not a claim of the chapter, a unit that is not the claim's, a figure that is no
    number. A claim without figures stays in the table as "not measured here". The figures go to the ledger, if it can
    be written, for the table of the whole course (`labkit.course_claims`).
    """
    claims = load_claims(chapter)
    _check.require(isinstance(measured, Mapping), "measured", measured, "figures by claim id")
    for claim_id in measured:
        _check.choice("measured", claim_id, [c.id for c in claims])
    rows = tuple(row_of(claim, measured.get(claim.id)) for claim in claims)
    for row in rows:
        keep_figures(row.claim.id, row.claim.unit, row.figures)
    return ClaimsTable(rows)


@dataclass(frozen=True)
class ReferenceResult:
    """A published figure: a row of `data/reference_results.yaml`, whose header says what each field means."""

    id: str
    topic: str
    quantity: str
    value: float
    unit: str
    model: str
    hardware: str
    conditions: str
    source: str
    status: str

    def __post_init__(self) -> None:
        _check.number("value", self.value)
        _check.choice("status", self.status, _STATUSES)

    def __str__(self) -> str:
        where = "" if self.hardware in ("any", "unstated") else f" on {self.hardware}"
        figure = readable(self.value, self.unit)
        return f"{figure} {Label.PUBLISHED}: {self.model}{where}, {self.conditions} ({self.source}; {self.status})"


@functools.cache
def _all_results() -> tuple[ReferenceResult, ...]:
    return tuple(ReferenceResult(**row) for row in _read(DATA / "reference_results.yaml", "results"))


def reference_results(topic: str | None = None) -> list[ReferenceResult]:
    """Published figures on a topic, such as "decode" or "quality", or all. Errors: ValueError for an unknown topic."""
    if topic is not None:
        _check.choice("topic", topic, sorted({r.topic for r in _all_results()}))
    return [r for r in _all_results() if topic in (None, r.topic)]
