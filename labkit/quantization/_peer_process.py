"""A runner started in its environment: what goes into its folder, how it is stopped, and what is said when it fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from labkit._paths import DATA
from labkit.hardware import describe
from labkit.quantization._peer_environments import Peer, missing

_TAIL_LINES = 15


class PeerUnavailable(RuntimeError):
    """Another library that is not installed."""


class PeerFailed(RuntimeError):
    """A run of another library that brought no result; the message ends with the last that it printed."""


# A notebook sets the third and the fourth; the last are nothing for unmaintained code.
_OURS_ALONE = ("PYTHONPATH", "PYTHONHOME", "TRITON_INTERPRET", "MPLBACKEND", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def cores() -> int:
    """Threads of a run where nobody asks for another number."""
    return describe("cpu").cores or 1


def write_job(folder: Path, settings: Mapping[str, object], tokens: Mapping[str, Tensor]) -> None:
    """Settings and token ids as a runner reads them."""
    save_file({name: ids.long().cpu().contiguous() for name, ids in tokens.items()}, folder / "tokens.safetensors")
    (folder / "settings.json").write_text(json.dumps(dict(settings)), encoding="utf-8")


def _environment(peer: Peer, threads: int) -> dict[str, str]:
    """This process's, without what is meant for this one's packages and without secrets; no hub is asked."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS_ALONE}
    own = {} if peer.environment else {"PYTHONPATH": str(DATA.parent)}
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONNOUSERSITE": "1"}
    threading = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    return kept | own | fixed | threading


def run_job(peer: Peer, script: Path, folder: Path, *, threads: int, timeout_s: float) -> dict[str, object]:
    """`result.json` of a script run on a folder.

    Errors: PeerUnavailable; PeerFailed for an exit status other than 0, for no end within `timeout_s`, and for no JSON.
    """
    reason = missing(peer)
    if reason:
        raise PeerUnavailable(reason)
    log = folder / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(peer.python), str(script), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=_environment(peer, threads),
            cwd=folder,
            start_new_session=True,
        )
        status = _wait(process, timeout_s)
    what = f"{peer.title} ({script.name})"
    if status is None:
        raise PeerFailed(f"{what} did not end within {timeout_s:g} s and was stopped. It last said:\n{_tail(log)}")
    if status:
        raise PeerFailed(f"{what} stopped with status {status}. It last said:\n{_tail(log)}")
    return read_result(folder, what)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit status, or None where it had to be stopped; an interrupt stops it too, with all that it started."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    """Of a bar that is drawn over itself, its last state."""
    text = log.read_bytes().decode("utf-8", errors="replace") if log.exists() else ""
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return "\n".join([line for line in lines if line][-_TAIL_LINES:]) or "(nothing)"


def read_result(folder: Path, what: str) -> dict[str, object]:
    """`result.json` of a runner. Errors: PeerFailed where it is missing or not whole, with what was printed last."""
    path, log = folder / "result.json", folder / "log.txt"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = "wrote no result.json" if isinstance(error, OSError) else f"wrote a result.json that is no JSON ({error})"
        raise PeerFailed(f"{what} ended and {why}. It last said:\n{_tail(log)}") from error
    needed = {"seconds", "versions"}
    if not isinstance(found, dict) or needed - set(found):
        raise PeerFailed(f"{what} wrote a result.json without {' and '.join(sorted(needed))}:\n{str(found)[:300]}")
    return found
