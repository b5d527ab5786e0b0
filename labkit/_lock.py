"""Turns on a device: one measurement at a time, across the threads and the processes of one machine."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from labkit import _check

_locks: dict[str, tuple[threading.RLock, FileLock]] = {}
_locks_guard = threading.Lock()


def _lock_pair(device: torch.device) -> tuple[threading.RLock, FileLock]:
    with _locks_guard:
        if str(device) not in _locks:
            name = f"labkit-{str(device).replace(':', '-')}"
            # Every learner on the machine must be able to open it, hence the system's folder and the mode.
            path = Path(tempfile.gettempdir()) / f"{name}.lock"
            if path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK)):
                # Somebody's own file of that name: turns with nobody else are better than no measurement.
                path = path.with_name(f"{name}-{os.getuid()}.lock")
            _locks[str(device)] = (threading.RLock(), FileLock(path, mode=0o666, thread_local=False))
        return _locks[str(device)]


@contextlib.contextmanager
def device_lock(device: torch.device | str | None = None, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the device for one measurement; re-entrant, across the threads and processes of one machine.

    `on_wait` is called once, before waiting, when somebody else holds it.
    """
    thread_lock, file_lock = _lock_pair(_check.device("device", device))
    waited = not thread_lock.acquire(blocking=False)
    if waited:
        if on_wait is not None:
            on_wait()
        thread_lock.acquire()
    try:
        try:
            file_lock.acquire(timeout=0)
        except Timeout:
            if on_wait is not None and not waited:
                on_wait()
            file_lock.acquire()
        try:
            yield
        finally:
            file_lock.release()
    finally:
        thread_lock.release()
