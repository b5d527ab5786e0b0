"""Result files of `gpu-check`: written section by section, read back to say which sources have run on a GPU.

A file in `data/gpu_results/` holds one machine's run: label, chip, and by section its status, results and the SHA-256
of the sources that it exercised. A source has run on a GPU when some section that passed holds the hash of its text.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from labkit._paths import DATA

RESULTS = DATA / "gpu_results"
ROOT = DATA.parent
RECORDED = "RECORDED"
# What `--allow-cpu` writes: proof that the sections run, never a figure.
SELF_TEST = "SELF-TEST ON A CPU, NOT A GPU RESULT"


def source_hashes(patterns: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """SHA-256 by path relative to `root`, of the files that glob patterns such as `labkit/engine/*.py` name."""
    files = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    return {p.relative_to(root).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def commit(root: Path = ROOT) -> str | None:
    """The commit of the checkout, with "+changes" if files differ from it; None outside a repository."""
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        state = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+changes" if state.stdout.strip() else "")


def write_atomically(path: Path, content: object) -> None:
    """Write JSON so that a reader, or a run that is killed, finds either the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def recorded_runs(folder: Path = RESULTS) -> list[dict]:
    """The GPU runs kept in `folder`; self-tests on a CPU are not among them."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [run for run in runs if run.get("label") == RECORDED and run.get("kind") == "cuda"]


def has_run_on_gpu(source: str, *, folder: Path = RESULTS, root: Path = ROOT) -> bool:
    """True if a recorded section that passed exercised this very text of `source`, such as `labkit/engine/decode.py`.

    Errors: ValueError if there is no such file.
    """
    now = source_hashes([source], root)
    if len(now) != 1:
        raise ValueError(f"source: got {source!r}; takes one file's path relative to {root}")
    passed = (s for run in recorded_runs(folder) for s in run["sections"].values() if s["status"] == "ok")
    return any(section["sources"].get(path) == sha for section in passed for path, sha in now.items())
