"""Memory that was freed, given back to the system."""

import ctypes
import functools
import sys
from collections.abc import Callable


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's, or None where the C library is another."""
    if not sys.platform.startswith("linux"):
        return None
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return trim


def give_back_freed_memory() -> None:
    """Return freed pages of the C heap to the system, where there is a way.

    Once a block of some MB has been freed, glibc keeps blocks up to that size on its heap, where what lies behind them
    pins them: a model whose float weights are gone would go on taking most of their memory.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
