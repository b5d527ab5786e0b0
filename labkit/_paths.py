"""Where the project's data lies and where labkit keeps what it makes."""

import os
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"


def cache_dir() -> Path:
    """Folder of converted models and the ledger: `LABKIT_CACHE`, or `~/.cache/labkit`. Created when asked for."""
    path = Path(os.environ.get("LABKIT_CACHE") or Path.home() / ".cache" / "labkit").expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path
