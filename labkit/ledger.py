"""What was measured, and the ledger that keeps it, ready to be compared with another machine's."""

import contextlib
import importlib.metadata
import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit._paths import cache_dir

if TYPE_CHECKING:
    from labkit.measure import Timing

_LATEST = 2.0**37  # the year 6325: later than any date that a table can show is no time


class Label(StrEnum):
    """Where a figure comes from."""

    MEASURED = "MEASURED"  # it ran just now, here
    RECORDED = "RECORDED"  # an earlier run of this project: machine, date, commit
    MODELLED = "MODELLED"  # a formula
    PUBLISHED = "PUBLISHED"  # someone's paper, cited


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def device_name(device: torch.device | str) -> str:
    """What the maker calls it: the GPU's name, or the processor's."""
    device = _check.device("device", device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def library_versions() -> dict[str, str]:
    """Versions of what a measurement depends on: Python and the libraries under labkit that are installed."""
    versions = {"python": platform.python_version()}
    for library in ("torch", "triton", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return versions


@dataclass(frozen=True)
class Measurement:
    """One figure with all that is needed to compare it with another machine's."""

    name: str
    value: float
    unit: str
    p10: float | None = None
    p90: float | None = None
    label: Label = Label.MEASURED
    params: dict[str, object] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtype: str | None = None
    backend: str | None = None
    device: str = ""
    threads: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    time: float = 0.0  # seconds since the epoch

    def __post_init__(self) -> None:
        _check.require(isinstance(self.name, str) and bool(self.name), "name", self.name, "a name")
        _check.number("value", self.value)
        _check.require(isinstance(self.unit, str), "unit", self.unit, "a unit's name")
        _check.choice("label", self.label, list(Label))
        _check.number("time", self.time, 0.0, _LATEST)
        if (self.p10, self.p90) != (None, None):
            for name in ("p10", "p90"):
                _check.number(name, getattr(self, name))
        # What cannot be written is refused here, and not when a figure that was measured is to be kept.
        for name in ("params", "shapes", "versions"):
            given = getattr(self, name)
            kept = isinstance(given, dict) and _is_json(given)
            _check.require(kept, name, given, "a dict of text, finite numbers and lists")
        for name in ("dtype", "backend", "device"):
            _check.require(isinstance(getattr(self, name), str | None), name, getattr(self, name), "text or None")

    @classmethod
    def of(
        cls,
        name: str,
        value: float,
        unit: str,
        *,
        device: torch.device | str | None = None,
        spread: "Timing | None" = None,
        **details: object,
    ) -> "Measurement":
        """Fill in the machine: device name, thread count, library versions, time. `spread` gives p10 and p90."""
        device = _check.device("device", device)
        known = {f.name for f in fields(cls)}
        for key in details:
            _check.choice("details", key, sorted(known))
        if spread is not None:
            takes = "a Timing, as time_op returns"
            _check.require(hasattr(spread, "p10") and hasattr(spread, "p90"), "spread", spread, takes)
            details |= {"p10": spread.p10, "p90": spread.p90}
        if isinstance(details.get("dtype"), torch.dtype):
            details["dtype"] = str(details["dtype"]).removeprefix("torch.")
        machine = {
            "device": device_name(device),
            "threads": torch.get_num_threads() if device.type == "cpu" else None,
            "versions": library_versions(),
            "time": time.time(),
        }
        return cls(name, _check.number("value", value), unit, **(machine | details))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Measurement":
        """Read back what `to_json` wrote; fields that a later version added are left out. Errors: ValueError."""
        _check.require(isinstance(line, str), "line", line, "a line that to_json wrote")
        known = {f.name for f in fields(cls)}
        try:
            found = json.loads(line)
        except RecursionError:  # brackets by the thousand
            found = None
        whole = isinstance(found, dict) and found.keys() >= {"name", "value", "unit"}
        _check.require(whole, "line", line, "a line that to_json wrote")
        raw = {key: value for key, value in found.items() if key in known}
        return cls(**(raw | {"label": Label(raw.get("label", Label.MEASURED))}))


class Ledger:
    """Measurements as JSON lines, appended one by one, so that a killed kernel loses nothing already measured.

    The file is `path`, or `LABKIT_LEDGER`, or `ledger.jsonl` in the cache.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        _check.require(isinstance(path, str | Path | None), "path", path, "a file's path, or None")
        self.path = Path(path or os.environ.get("LABKIT_LEDGER") or cache_dir() / "ledger.jsonl").expanduser()
        _check.require(not self.path.is_dir(), "path", str(self.path), "a file, and this is a folder")

    def append(self, measurement: Measurement) -> Measurement:
        """Write one line, in one write; returns the measurement."""
        _check.require(isinstance(measurement, Measurement), "measurement", measurement, "a Measurement")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = (measurement.to_json() + "\n").encode()
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(file).st_size
            # A run killed in the middle of a line leaves it without an end; the next line must not join it.
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line
            os.write(file, line)
        finally:
            os.close(file)
        return measurement

    def read(self) -> list[Measurement]:
        """All measurements, oldest first; a line that a killed run left torn is passed over."""
        if not self.path.exists():
            return []
        measurements = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                measurements.append(Measurement.from_json(line))
        return measurements
