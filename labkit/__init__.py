"""labkit: real implementations of what makes LLM inference fast, small enough to read.

Importing this package imports neither torch nor a GPU library; the names below load their room on first use.
"""

import importlib
import os
import sys

__version__ = "0.1.0"

# Spinning OpenMP threads beside a busy neighbour stall an op by milliseconds; the runtime reads this as torch loads.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A short spin spares a sleep and a wake-up at each of the hundreds of small parallel regions of a decode step.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_ROOM_OF = {
    "load_model": "labkit.models",
    "Decoder": "labkit.engine",
    "Ledger": "labkit.measure",
    "detect_device": "labkit.hardware",
    "measure_ceilings": "labkit.hardware",
    "time_op": "labkit.measure",
}

__all__ = ["__version__", *_ROOM_OF]


def __getattr__(name: str) -> object:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(_ROOM_OF[name]), name)
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
