from pathlib import Path

import pytest

from labkit.labs import (
    _flash_attention_compute,
    _flash_attention_steps,
    _frame,
    _kv_cache_compute,
    _kv_cache_steps,
    _roofline_compute,
)
from labkit.measure import Ledger
from tests.labs.fake import WAIT_S, FakeCompute, build
from tests.labs.roofline_fixtures import CEILINGS


@pytest.fixture
def ledger(_own_ledger: Path) -> Ledger:
    """The empty ledger that the labs of this test write to."""
    return Ledger(_own_ledger)


@pytest.fixture
def fixed_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab finds the same ceilings wherever the test runs."""
    monkeypatch.setattr(_roofline_compute, "measure_ceilings", lambda device, refresh=False: CEILINGS)


@pytest.fixture
def fixed_kv_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache's lab finds the same ceilings wherever the test runs and no recorded merge, and clocks briefly."""

    def no_study() -> None:
        raise FileNotFoundError("kv_merge.json")

    monkeypatch.setattr(_kv_cache_compute, "measure_ceilings", lambda device, refresh=False: CEILINGS)
    monkeypatch.setattr(_kv_cache_compute, "recorded_merge_study", no_study)
    monkeypatch.setattr(_kv_cache_compute, "_COLD", 0)
    monkeypatch.setitem(_kv_cache_steps._MIN_RUN_S, "cpu", 0.0)


@pytest.fixture
def fixed_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention lab finds the same ceilings wherever the test runs, and clocks briefly."""
    monkeypatch.setattr(_flash_attention_compute, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(_flash_attention_compute, "_BUDGET_S", 0.0)
    monkeypatch.setattr(_flash_attention_compute, "_BRIEF_S", 0.0)
    monkeypatch.setattr(_flash_attention_steps, "peak_memory", lambda op, device: op().nbytes)


@pytest.fixture
def fixed_speculative(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speculation lab clocks two rounds, and finds the same costs wherever the test runs."""
    from labkit.labs import _speculative_compute
    from tests.labs.speculative_fixtures import costs

    monkeypatch.setattr(_speculative_compute, "_BUDGET_S", 0.0)
    found = {gamma: costs(gamma) for gamma in range(1, 9)}
    monkeypatch.setattr(_speculative_compute, "measure_costs", lambda *args, **options: found[args[3]])


@pytest.fixture
def compute() -> FakeCompute:
    """The fake lab's compute, with its gate open."""
    compute = FakeCompute()
    compute.gate.set()
    return compute


@pytest.fixture
def lab(compute: FakeCompute, ledger: Ledger, monkeypatch: pytest.MonkeyPatch):
    """The fake lab, with its default measured and a picture that costs nothing."""
    monkeypatch.setattr(_frame, "to_png", lambda figure: b"\x89PNG picture")
    lab = build(compute)
    assert lab.wait(WAIT_S)
    return lab
