"""A time limit for a learner's function: a loop that never ends must end its check."""

import ctypes
import threading
import time
from collections.abc import Callable

from labkit.exercises._exercise import Failed

_LOOK_EVERY_S = 0.05


class Endless(BaseException):
    """Raised inside a function that does not come to its end. Not an Exception, so that no handler there keeps it."""


class _TimeIsUp(Endless):
    """Sent by the thread that watches the time."""


def _send(thread: int) -> None:
    """Raise _TimeIsUp in that thread at its next step of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_TimeIsUp))


def within(seconds: float, function: Callable[[], object], endless: str) -> object:
    """Call `function`; once it has computed for that long, or raised Endless, fail with `endless` or Endless's message.

    The time is the processor's, so that a machine that is busy with other things does not cut short what would end. A
    thread watches it, which works outside the main thread and on every system; what waits in one call is not ended.
    """
    thread, lock, begin = threading.get_ident(), threading.Lock(), time.process_time()
    ended, sent = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            with lock:
                if not ended.is_set() and time.process_time() - begin > seconds:
                    sent.set()
                    _send(thread)

    try:
        threading.Thread(target=watch, daemon=True).start()
        try:
            return function()
        finally:
            with lock:
                ended.set()
            if sent.is_set():
                time.sleep(0)  # what was sent and has not come comes here, and not later
    except Endless as error:
        raise Failed(str(error) or endless) from None
