"""Asynchronous requests from a notebook, whose own thread already runs an event loop."""

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_own_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end in an event loop and a thread of its own, and return its result; an interrupt ends it."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(work)

    def run() -> T:
        try:
            return loop.run_until_complete(task)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    with ThreadPoolExecutor(1, "serving") as pool:
        future = pool.submit(run)
        try:
            return future.result()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(task.cancel)
            raise
