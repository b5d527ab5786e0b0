"""Where the project's data lies and where labkit keeps what it makes."""

import os
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"


def cache_dir() -> Path:
    """Folder of converted models and the ledger: `LABKIT_CACHE`, or `~/.cache/labkit`. Created when asked for."""
    try:
        path = Path(os.environ.get("LABKIT_CACHE") or "~/.cache/labkit").expanduser()
    except RuntimeError:  # no home: an unknown user's, or a container's user without one
        path = None
    if path is None or not path.is_absolute():
        # A notebook runs in its own folder: a relative path would be another cache there.
        got = os.environ.get("LABKIT_CACHE")
        raise ValueError(f"LABKIT_CACHE: got {got!r}; takes the absolute path of a folder that can be written")
    path.mkdir(parents=True, exist_ok=True)
    return path
