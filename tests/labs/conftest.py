from pathlib import Path

import pytest

from labkit.labs import _roofline_compute
from labkit.measure import Ledger
from tests.labs.roofline_fixtures import CEILINGS


@pytest.fixture
def ledger(_own_ledger: Path) -> Ledger:
    """The empty ledger that the labs of this test write to."""
    return Ledger(_own_ledger)


@pytest.fixture
def fixed_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab finds the same ceilings wherever the test runs."""
    monkeypatch.setattr(_roofline_compute, "measure_ceilings", lambda device, refresh=False: CEILINGS)
