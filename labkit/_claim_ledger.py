"""The figures behind the claims in the ledger: what `claims_table` leaves there, and what `course_claims` finds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace

from labkit.measure import Label, Ledger, Measurement

# All conditions of one showing stand in each of its lines, so that a later showing under others replaces it whole.
_CLAIM, _CONDITION, _CONDITIONS = "claim", "condition", "conditions"


def keep_figures(claim_id: str, unit: str, figures: Mapping[str, Measurement | float]) -> None:
    """Append a claim's figures, by condition, each with its own label; a bare number is a formula's result.

    Where the ledger cannot be written nothing is kept, and nothing is raised: a table of claims is shown all the same.
    """
    # A folder in the file's place is a ValueError of the ledger.
    with contextlib.suppress(OSError, ValueError):
        ledger, conditions = Ledger(), list(figures)
        for condition, figure in figures.items():
            ledger.append(_line(claim_id, unit, condition, figure, conditions))


def _line(claim_id: str, unit: str, condition: str, figure: Measurement | float, conditions: list[str]) -> Measurement:
    params: dict[str, object] = {_CLAIM: claim_id, _CONDITION: condition, _CONDITIONS: conditions}
    name = f"claim {claim_id}"
    if isinstance(figure, Measurement):
        return replace(figure, name=name, params=figure.params | {"measurement": figure.name} | params)
    return Measurement(name, float(figure), unit, label=Label.MODELLED, params=params, time=time.time())


def figures_in(ledger: Ledger, units: Mapping[str, str]) -> dict[str, dict[str, Measurement]]:
    """By claim and condition: the newest figures of each claim, those of its last showing and no older ones. Lines in
    another unit than the claim's, by `units`, count for none."""
    newest: dict[str, dict[str, Measurement]] = {}
    wanted: dict[str, list[str]] = {}
    for line in ledger.read():
        claim_id, condition, conditions = (line.params.get(key) for key in (_CLAIM, _CONDITION, _CONDITIONS))
        # A ledger is a file that anyone may write to.
        if not (isinstance(claim_id, str) and isinstance(condition, str) and isinstance(conditions, list)):
            continue
        if not all(isinstance(name, str) for name in conditions) or units.get(claim_id) != line.unit:
            continue
        wanted[claim_id] = conditions
        newest.setdefault(claim_id, {})[condition] = line
    return {
        claim_id: {condition: found[condition] for condition in wanted[claim_id] if condition in found}
        for claim_id, found in newest.items()
    }
