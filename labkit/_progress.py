"""What somebody sees while a step takes longer than a second.

A terminal gets a bar that is gone when the step is done. A notebook's output and a log keep what they are sent, so
they get whole lines, and few of them.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

_LINE_EVERY_S = 10.0


def say(line: str) -> None:
    """One line, now: to standard error, or to a notebook's output, which paints standard error red."""
    in_notebook = type(sys.stdout).__module__.startswith("ipykernel")
    print(line, file=sys.stdout if in_notebook else sys.stderr, flush=True)


@contextlib.contextmanager
def progress(label: str, total: int, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Yields `update(done)`, to be called with what is done so far out of `total`: bytes, or another `unit`.

    In a terminal: a bar, from the first second on. Elsewhere: a line every ten seconds, hence none for short steps.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", delay=1.0, leave=False) as bar:
            yield lambda done: bar.update(done - bar.n)
        return
    last = time.monotonic()

    def update(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            amount = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if unit == "B" else f"{done} of {total} {unit}"
            say(f"{label}: {amount}")

    yield update
