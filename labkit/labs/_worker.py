"""One measuring thread for a lab, in which the latest setting wins."""

import logging
import threading
from collections.abc import Callable


class Run:
    """One job's right to go on: `cancelled()` turns true when a newer setting arrives or the learner stops it."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()


class LatestWorker:
    """Runs `job(setting, run)` off the main thread: at most one at a time, at most one waiting.

    A setting submitted while another runs cancels that one and takes the waiting place of any earlier one, so that a
    slider dragged through ten values measures the last, never a queue of ten. The thread ends when nothing is left to
    do: the next one takes on the thread count that torch has by then. `job` handles its own errors.
    """

    def __init__(self, job: Callable[[object, Run], None]) -> None:
        self._job = job
        self._changed = threading.Condition()
        self._pending: object | None = None
        self._running: Run | None = None
        self._thread: threading.Thread | None = None

    def submit(self, setting: object) -> None:
        """Make `setting` the next to run; whatever runs or waits gives way to it."""
        with self._changed:
            self._pending = setting
            if self._running is not None:
                self._running.cancel()
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="labkit-lab", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Cancel what runs and forget what waits."""
        with self._changed:
            self._pending = None
            if self._running is not None:
                self._running.cancel()

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits."""
        with self._changed:
            return self._thread is not None

    def wait(self, timeout: float | None = None) -> bool:
        """Block until nothing runs or waits; False when `timeout` seconds pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def _loop(self) -> None:
        while True:
            with self._changed:
                setting, self._pending = self._pending, None
                if setting is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                self._running = run = Run()
            try:
                self._job(setting, run)
            except BaseException:  # an interrupt too: whatever ended this job, the next setting must find a worker
                logging.getLogger(__name__).exception("a lab's job failed")
            with self._changed:
                self._running = None
