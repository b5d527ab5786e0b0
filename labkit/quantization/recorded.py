"""Runs over a whole model that take minutes, as this project recorded them: `data/recorded/quantization.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit._paths import DATA
from labkit._table import Table
from labkit.measure import Label, Measurement

RECORDED = DATA / "recorded" / "quantization.json"
SENSITIVITY = DATA / "recorded" / "sensitivity_3bit.json"


@dataclass(frozen=True)
class RecordedRun:
    """One setting over the whole model: `method` is RTN, GPTQ or AWQ, `plan` "uniform" or how bits were mixed.

    perplexity and baseline (the float model's) are over the same windows; `bits_per_weight` counts scales, zero points
    and indices; `seconds` is what quantizing took; `note` what else there is to know.
    """

    method: str
    bits: int
    group_size: int
    sym: bool
    perplexity: float
    bits_per_weight: float
    seconds: float
    baseline: float
    model: str
    machine: str
    date: str
    commit: str
    plan: str = "uniform"
    calibration: str = ""
    evaluation: str = ""
    note: str = ""

    def measurement_of_loss(self) -> Measurement:
        """Perplexity over the float model's, labelled RECORDED."""
        return dataclasses.replace(
            self.measurement(), name="perplexity ratio", value=self.perplexity / self.baseline, unit="ratio"
        )

    def measurement(self) -> Measurement:
        """The perplexity, labelled RECORDED."""
        kept = ("method", "bits", "group_size", "sym", "plan", "model", "date", "commit")
        params = {name: getattr(self, name) for name in kept}
        device = self.machine
        return Measurement("perplexity", self.perplexity, "", label=Label.RECORDED, device=device, params=params)


@functools.cache
def recorded_runs(path: Path = RECORDED) -> tuple[RecordedRun, ...]:
    """All recorded runs; none where there is no such file."""
    if not path.exists():
        return ()
    found = json.loads(path.read_text(encoding="utf-8"))
    return tuple(_run(found["common"] | run) for run in found["runs"])


def _run(fields: Mapping[str, object]) -> RecordedRun:
    """A perplexity beyond what a float holds is kept as null."""
    infinite = {"perplexity": math.inf} if fields["perplexity"] is None else {}
    return RecordedRun(**(fields | infinite))


def recorded_run(method: str, bits: int, group_size: int, *, plan: str = "uniform") -> RecordedRun | None:
    """The recorded run of a setting, or None."""
    asked = (method, bits, group_size, plan)
    return next((r for r in recorded_runs() if (r.method, r.bits, r.group_size, r.plan) == asked), None)


def _loss(run: RecordedRun) -> str:
    """In percent, and in multiples where percent no longer says anything."""
    ratio = run.perplexity / run.baseline
    return f"{ratio - 1:+.1%}" if ratio < 10 else f"{ratio:,.0f}x"


def runs_table(runs: Iterable[RecordedRun]) -> Table:
    """A row a run, with what it lost over the float model and the machine that it ran on."""
    rows = tuple(
        (
            run.method if run.plan == "uniform" else f"{run.method}, {run.plan}",
            str(run.bits) if run.plan == "uniform" else "mixed",
            "row" if run.group_size == -1 else str(run.group_size),
            f"{run.bits_per_weight:.2f}",
            f"{run.perplexity:.2f}",
            _loss(run),
            f"{run.seconds:.0f} s" + (f" ({run.note})" if run.note else ""),
        )
        for run in runs
    )
    return Table(("method", "bits", "group", "bits stored", "perplexity", "loss", "time"), rows)


@dataclass(frozen=True)
class RecordedSensitivity:
    """KL in nats a token that rounding each matrix alone to `bits` adds, by the matrix's full name."""

    by_name: Mapping[str, float]
    bits: int
    group_size: int
    machine: str
    date: str
    commit: str

    def by_kind(self) -> dict[str, list[float]]:
        """Values by kind of matrix (q_proj … down_proj), each in the order of the layers."""
        kinds: dict[str, list[float]] = {}
        for name, value in self.by_name.items():
            kinds.setdefault(name.rpartition(".")[2], []).append(value)
        return kinds


@functools.cache
def recorded_sensitivity(path: Path = SENSITIVITY) -> RecordedSensitivity:
    """The default model's, at 3 bits in groups of 64. Errors: FileNotFoundError where it was not recorded."""
    return RecordedSensitivity(**json.loads(path.read_text(encoding="utf-8")))
