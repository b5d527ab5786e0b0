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


def test_lines_that_are_no_measurement_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    wrong = ["[1]", "3", "null", '"a"', "{}", "[" * 100_000, '{"name": "a", "value": 1, "unit": "s", "p10": 1}']
    wrong += ['{"name": "a", "value": 1, "unit": "s", "time": "yesterday"}', '{"name": "a", "value": 1, "unit": []}']
    path.write_text("\n".join([*wrong, Measurement("good", 1.0, "s").to_json()]) + "\n")
    assert [m.name for m in Ledger(path).read()] == ["good"]


def test_processes_that_append_at_once_tear_no_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    code = (
        "import sys\nfrom labkit.measure import Ledger, Measurement\n"
        f"ledger, params = Ledger({str(path)!r}), {{'x': 'y' * 5000}}\n"
        "for i in range(200): ledger.append(Measurement(sys.argv[1], i, 's', params=params))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, str(n)]) for n in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    found = Ledger(path).read()
    assert {(m.name, m.value) for m in found} == {(str(n), i) for n in range(4) for i in range(200)}
    assert len(found) == 800


def test_a_later_version_s_fields_are_left_out(tmp_path: Path) -> None:
    line = Measurement("a", 1.0, "s").to_json().replace('"name"', '"invented": 3, "name"')
    assert Measurement.from_json(line) == Measurement("a", 1.0, "s")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Measurement("", 1.0, "s"), "name"),
        (lambda: Measurement("a", float("nan"), "s"), "value"),
        (lambda: Measurement("a", 1.0, "s", label="GUESSED"), "label"),
        (lambda: Measurement("a", float("inf"), "s"), "value"),
        (lambda: Measurement.of("a", None, "s"), "value"),
        (lambda: Measurement("a", 1.0, "s", p10=1.0), "p90"),
        (lambda: Measurement("a", 1.0, "s", params={"dtype": torch.float32}), "params"),
        (lambda: Measurement("a", 1.0, "s", params={"x": float("nan")}), "params"),
        (lambda: Measurement("a", 1.0, "s", shapes=[1]), "shapes"),
        (lambda: Measurement("a", 1.0, "s", dtype=torch.float32), "dtype"),
        (lambda: Measurement("a", 1.0, "s", time="yesterday"), "time"),
        (lambda: Measurement("a", 1.0, "s", time=1e300), "time"),
        (lambda: Measurement.of("a", 1.0, "s", spread=0.1), "spread"),
        (lambda: Measurement.from_json("[1]"), "line"),
        (lambda: Ledger(5), "path"),
        (lambda: Ledger("/"), "path"),
        (lambda: Measurement.of("a", 1.0, "s", parms={}), "details"),
        (lambda: Ledger("x").append("a line"), "measurement"),
    ],
)
def test_refusals(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        make()
