"""The only place that branches on a library's version or works around one."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's own start and stop lines, which torch 2.13 writes to file descriptor 2, off the screen."""
    saved = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
