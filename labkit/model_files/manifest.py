"""The list of a model folder's files with size and SHA-256, by which damage is found before anything is loaded."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file; `progress` is called with the bytes read so far."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        done = 0
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            done += read
            if progress is not None:
                progress(done)
    return digest.hexdigest()


def write(folder: Path, origin: dict[str, object]) -> None:
    """List every file of `folder`, with `origin`: what the files were made from."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    text = json.dumps({"origin": origin, "files": files}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def problem(folder: Path, origin: dict[str, object]) -> str | None:
    """What is wrong with a folder that `write` listed, in a few words; None if every byte is as it was."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in listed["files"].items()}
        made_from = listed["origin"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} is missing or damaged"
    if made_from != origin or not files:
        return "it was made from other files or by an older labkit"
    for name, (size, digest) in files.items():
        path = folder / name
        if not path.is_file():
            return f"its {name} is missing"
        if path.stat().st_size != size:
            return f"its {name} has {path.stat().st_size} bytes in place of {size}"
        if sha256(path) != digest:
            return f"its {name} does not match its SHA-256"
    return None
