import pytest

from labkit.measure import Ledger


@pytest.fixture
def ledger(_own_ledger) -> Ledger:
    """The empty ledger that the labs of this test write to."""
    return Ledger(_own_ledger)
