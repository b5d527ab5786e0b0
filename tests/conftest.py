"""Fixtures for every test: a seed, a ledger and a device lock of the test's own, and the default model, loaded once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from labkit.models import LoadedModel

# Without a GPU the Triton kernels run in Triton's interpreter, which reads this as it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same random numbers in each test, whichever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Measurements of a test go to a file of its own, never to the user's ledger."""
    path = tmp_path / "ledger.jsonl"
    monkeypatch.setenv("LABKIT_LEDGER", str(path))
    return path


@pytest.fixture(scope="session", autouse=True)
def _own_device_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A device lock of this process's own: tests wait neither for one another nor for whoever measures on the machine.

    What a test asserts of a time holds on a busy device too. Kernels and commands, processes of their own, share the
    machine's lock as ever.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("device")))
        yield


@pytest.fixture(scope="session")
def default_model() -> Iterator[LoadedModel]:
    """The default model in float32 on the CPU, shared by all tests of a session: do not change its weights.

    Fetched into the user's own cache if it is not there yet, so that it is converted at most once.
    """
    from labkit.models import load_model

    yield load_model(dtype=torch.float32, device="cpu")
