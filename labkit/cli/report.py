"""`python -m labkit report`: the ledger as a table, and beside another machine's."""

import argparse
import fnmatch
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.cli.table import FORMATS, Table, html_page, readable

if TYPE_CHECKING:
    from labkit.ledger import Measurement

_COLUMNS = (
    "time",
    "name",
    "value",
    "p10 to p90",
    "label",
    "params",
    "dtype",
    "backend",
    "threads",
    "device",
)
_RAW = (*"time name value unit p10 p90 label params dtype backend threads device".split(),)
_COMPARED = (
    "name",
    "here",
    "there",
    "here / there",
    "params",
    "dtype",
    "backend",
    "device here",
    "device there",
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register `report`."""
    parser = commands.add_parser(
        "report",
        help="the ledger of measurements as a table, alone or beside another machine's",
        description="Print the ledger. With OTHER, match measurements by name, parameters and dtype and show the "
        "ratio of this ledger's median value to the other's.",
    )
    parser.add_argument("other", nargs="?", help="a ledger file from another machine or an earlier day")
    parser.add_argument(
        "--ledger",
        help="this ledger's file (default: LABKIT_LEDGER, or ledger.jsonl in the cache)",
    )
    parser.add_argument("--label", help="keep one label: MEASURED, RECORDED, MODELLED or PUBLISHED")
    parser.add_argument("--name", help="keep names that contain this, or match it where it holds * or ?")
    parser.add_argument("--last", type=int, metavar="N", help="keep the last N measurements")
    form = parser.add_mutually_exclusive_group()
    for name in ("csv", "html", "markdown"):
        form.add_argument(
            f"--{name}",
            dest="form",
            action="store_const",
            const=name,
            help=f"print {name}" + (", numbers as measured" if name == "csv" else ""),
        )
    parser.add_argument(
        "--output",
        type=Path,
        help="write the table to this file instead of printing it",
    )
    parser.set_defaults(run=command, form="text")


def command(args: argparse.Namespace) -> int:
    """Read, filter and print. Returns 0, also for an empty ledger, which it says in a table's place."""
    here = select(_read(args.ledger), label=args.label, name=args.name, last=args.last)
    if args.other is None:
        table = raw_table(here) if args.form == "csv" else ledger_table(here)
    else:
        there = select(_read(args.other), label=args.label, name=args.name, last=args.last)
        table = compared_table(here, there)
    if not table.rows:
        print(
            "labkit: no measurement matches; run a chapter or `make bench` to make some",
            file=sys.stderr,
        )
        if args.form == "text" and args.output is None:
            return 0
    shown = FORMATS[args.form](table)
    if args.form == "html":
        shown = html_page("labkit: measurements", shown)
    if args.output is None:
        print(shown.rstrip("\n"))
    else:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(shown.rstrip("\n") + "\n", encoding="utf-8")
        print(f"{len(table.rows)} rows written to {args.output}")
    return 0


def _read(path: str | None) -> "list[Measurement]":
    from labkit.ledger import Ledger

    ledger = Ledger(path)
    if path is not None and not ledger.path.is_file():
        raise ValueError(f"ledger: got {path}, which is no file; takes one of JSON lines that labkit wrote")
    return ledger.read()


def select(
    measurements: "Iterable[Measurement]",
    *,
    label: str | None = None,
    name: str | None = None,
    last: int | None = None,
) -> "list[Measurement]":
    """Those with that label and a name that contains or matches `name`, the last `last` of them, oldest first."""
    from labkit import _check
    from labkit.ledger import Label

    if label is not None:
        label = _check.choice("--label", label.upper(), [str(option) for option in Label])
    if last is not None:
        _check.integer("--last", last, 1)
    pattern = name if name and set(name) & set("*?") else f"*{name or ''}*"
    kept = [m for m in measurements if fnmatch.fnmatchcase(m.name, pattern) and label in (None, str(m.label))]
    return kept[-last:] if last is not None else kept


def _params(m: "Measurement") -> str:
    return " ".join(f"{key}={value}" for key, value in sorted((m.params | m.shapes).items()))


def _identity(m: "Measurement") -> dict[str, object]:
    return {
        "name": m.name,
        "params": _params(m),
        "dtype": m.dtype,
        "backend": m.backend,
    }


def ledger_table(measurements: "Iterable[Measurement]") -> Table:
    """One row a measurement, oldest first."""
    rows = []
    for m in measurements:
        spread = "" if m.p10 is None else f"{readable(m.p10, m.unit)} to {readable(m.p90, m.unit)}"
        rows.append(
            _identity(m)
            | {
                "time": datetime.fromtimestamp(m.time).strftime("%Y-%m-%d %H:%M:%S"),
                "value": readable(m.value, m.unit),
                "p10 to p90": spread,
                "label": str(m.label),
                "threads": m.threads,
                "device": m.device,
            }
        )
    return Table.of(rows, _COLUMNS)


def raw_table(measurements: "Iterable[Measurement]") -> Table:
    """As `ledger_table`, for another program: numbers as measured, the unit and the spread in columns of their own."""
    rows = [asdict(m) | {"params": json.dumps(m.params | m.shapes, sort_keys=True)} for m in measurements]
    return Table.of(rows, _RAW)


def _by_key(measurements: "Iterable[Measurement]") -> "dict[str, list[Measurement]]":
    """Measurements of the same thing: same name, unit, parameters, shapes and dtype. The backend may differ."""
    groups: dict[str, list[Measurement]] = {}
    for m in measurements:
        key = json.dumps([m.name, m.unit, m.params, m.shapes, m.dtype], sort_keys=True)
        groups.setdefault(key, []).append(m)
    return groups


def compared_table(here: "Iterable[Measurement]", there: "Iterable[Measurement]") -> Table:
    """What both ledgers hold, by the median of each, with the ratio; what one of them lacks is left out."""
    theirs = _by_key(there)
    rows = []
    for key, mine in _by_key(here).items():
        if key not in theirs:
            continue
        value, other = (statistics.median(m.value for m in group) for group in (mine, theirs[key]))
        rows.append(
            _identity(mine[-1])
            | {
                "here": readable(value, mine[-1].unit),
                "there": readable(other, mine[-1].unit),
                "here / there": f"{value / other:.3f}" if other else "",
                "device here": mine[-1].device,
                "device there": theirs[key][-1].device,
            }
        )
    return Table.of(rows, _COMPARED)
