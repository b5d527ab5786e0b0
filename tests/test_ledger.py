"""The ledger keeps what was measured, whatever happens to the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from labkit.measure import Label, Ledger, Measurement, Timing


def test_a_measurement_comes_back_as_it_was(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sub" / "ledger.jsonl")
    spread = Timing(0.2, 0.1, 0.3, 9)
    details = {"params": {"batch": 2}, "shapes": {"x": [2, 3]}, "dtype": torch.bfloat16, "backend": "torch"}
    written = ledger.append(Measurement.of("decode", 0.2, "s", device="cpu", spread=spread, **details))
    assert ledger.read() == [written]
    assert (written.p10, written.p90, written.dtype) == (0.1, 0.3, "bfloat16")
    assert written.device and written.threads == torch.get_num_threads() and written.versions["torch"]
    assert written.label is Label.MEASURED and abs(written.time - time.time()) < 60


def test_the_ledger_is_where_the_environment_says(_own_ledger: Path) -> None:
    assert Ledger().path == _own_ledger


def test_a_torn_line_loses_only_itself(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    first = ledger.append(Measurement("a", 1.0, "s"))
    with ledger.path.open("a") as file:
        file.write('{"name": "torn", "val')
    second = ledger.append(Measurement("b", 2.0, "s"))
    assert ledger.read() == [first, second]


def test_a_killed_run_keeps_what_it_had_measured(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    code = (
        "import sys, time\nfrom labkit.measure import Ledger, Measurement\n"
        f"for i in range(3): Ledger({str(path)!r}).append(Measurement('n', float(i), 's'))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    assert [m.value for m in Ledger(path).read()] == [0.0, 1.0, 2.0]


def test_a_later_version_s_fields_are_left_out(tmp_path: Path) -> None:
    line = Measurement("a", 1.0, "s").to_json().replace('"name"', '"invented": 3, "name"')
    assert Measurement.from_json(line) == Measurement("a", 1.0, "s")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Measurement("", 1.0, "s"), "name"),
        (lambda: Measurement("a", float("nan"), "s"), "value"),
        (lambda: Measurement("a", 1.0, "s", label="GUESSED"), "label"),
        (lambda: Measurement.of("a", 1.0, "s", parms={}), "details"),
        (lambda: Ledger("x").append("a line"), "measurement"),
    ],
)
def test_refusals(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        make()
