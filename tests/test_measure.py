"""Timing, peak memory and the device's lock."""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import _lock
from labkit.measure import Timing, compare_ops, device_lock, peak_memory, synchronize, time_op


@given(st.lists(st.floats(1e-9, 10), min_size=1, max_size=50))
def test_timing_orders_its_percentiles(seconds: list[float]) -> None:
    timing = Timing.of(seconds)
    assert min(seconds) <= timing.p10 <= timing.median <= timing.p90 <= max(seconds)
    assert timing.n == len(seconds) and timing.median in seconds


def test_time_op_measures_a_sleep() -> None:
    timing = time_op(lambda: time.sleep(0.004), device="cpu", min_run_s=0.02, warmup=0)
    assert 0.004 <= timing.median < 0.02 and timing.n >= 5


def test_time_op_times_short_calls_several_at_a_time() -> None:
    calls = 0

    def short() -> None:
        nonlocal calls
        calls += 1

    timing = time_op(short, device="cpu", min_run_s=0.001)
    assert timing.median < 5e-6 and calls > 100


def test_compare_ops_alternates() -> None:
    order: list[str] = []
    ops = {name: lambda name=name: (order.append(name), time.sleep(0.001)) for name in "AB"}
    timings = compare_ops(ops, device="cpu", min_run_s=0.0, warmup=0)
    # One call each to size the samples, then A B A B.
    assert order[2:] == ["A", "B"] * 5 and set(timings) == {"A", "B"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"fn": 3}, "fn"), ({"min_run_s": -1}, "min_run_s"), ({"warmup": 1.5}, "warmup"), ({"device": "tpu"}, "device")],
)
def test_time_op_refuses(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        time_op(**({"fn": lambda: None} | arguments))


def test_peak_memory_counts_every_byte_that_lives_at_once() -> None:
    # Two arrays of 4 MB live together; the third comes after the first is gone.
    def work() -> torch.Tensor:
        a = torch.ones(1_000_000)
        b = torch.ones(1_000_000)
        del a
        return torch.ones(500_000) if b.numel() else b

    assert peak_memory(work, device="cpu") == 8_000_000


def test_peak_memory_is_the_same_each_time() -> None:
    x = torch.randn(256, 256)
    assert len({peak_memory(lambda: (x @ x).relu(), device="cpu") for _ in range(3)}) == 1


def test_peak_memory_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    peak_memory(lambda: torch.ones(10), device="cpu")
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is reset through /proc")
def test_track_peak_sees_memory_that_came_and_went() -> None:
    """In a process of its own: in this one, pages that an earlier test left may serve again."""
    code = (
        "import torch; from labkit.measure import track_peak\n"
        "with track_peak('cpu') as quiet: pass\n"
        "with track_peak('cpu') as busy: torch.ones(50_000_000)\n"
        "print(busy.bytes - quiet.bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 150e6 < int(done.stdout) < 300e6


@pytest.fixture
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that no other test run on this machine holds, here and in processes started from here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(_lock, "_locks", {})


@pytest.mark.usefixtures("own_lock")
def test_the_lock_is_reentrant() -> None:
    waited = []
    with device_lock("cpu", lambda: waited.append(1)), device_lock("cpu", lambda: waited.append(2)):
        time_op(lambda: None, device="cpu", min_run_s=0.0, on_wait=lambda: waited.append(3))
    assert not waited


def test_a_file_of_that_name_that_cannot_be_opened_stops_no_measurement(own_lock: None, tmp_path: Path) -> None:
    (tmp_path / "labkit-cpu.lock").mkdir()
    assert time_op(lambda: None, device="cpu", min_run_s=0.0).n >= 5


@pytest.mark.usefixtures("own_lock")
def test_threads_take_turns_and_say_that_they_wait() -> None:
    events: list[str] = []

    def other() -> None:
        with device_lock("cpu", lambda: events.append("waits")):
            events.append("other runs")

    with device_lock("cpu"):
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.1)
        events.append("first ends")
    thread.join(5)
    assert events == ["waits", "first ends", "other runs"]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: compare_ops(None), "ops"),
        (lambda: compare_ops([print]), "ops"),
        (lambda: time_op(lambda: None, min_run_s=float("inf")), "min_run_s"),
        (lambda: time_op(lambda: None, on_wait=5), "on_wait"),
        (lambda: Timing.of(None), "seconds"),
        (lambda: Timing.of([float("nan")]), "seconds"),
        (lambda: synchronize("cpu"), "device"),
    ],
)
def test_what_cannot_be_timed_is_named(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        call()


@pytest.mark.usefixtures("own_lock")
def test_processes_take_turns() -> None:
    hold = "with device_lock('cpu', lambda: print('waits', flush=True)): print('ran')"
    code = f"from labkit.measure import device_lock\n{hold}"
    with device_lock("cpu"):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "waits\n"
        assert process.poll() is None
    assert process.communicate(timeout=30)[0] == "ran\n"


@pytest.mark.usefixtures("own_lock")
def test_an_error_gives_the_lock_back() -> None:
    with pytest.raises(RuntimeError, match="boom"):
        time_op(lambda: (_ for _ in ()).throw(RuntimeError("boom")), device="cpu")
    done = threading.Event()
    threading.Thread(target=lambda: (time_op(lambda: None, device="cpu", min_run_s=0.0), done.set())).start()
    assert done.wait(5)
