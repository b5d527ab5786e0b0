"""Threads that share a Decoder take turns: two that wrote to one cache at once would both read wrong tokens."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

from labkit import _check


class Turn:
    """A lock that its holder may take again, and that refuses a generation inside a generation."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._generating = False

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """The turn for a whole generation. Errors: ValueError inside another one, as a streamer that decodes with the
        Decoder that feeds it would be: it would empty the cache that the outer one goes on with."""
        with self:
            takes = "another Decoder: this one is in the middle of a generation"
            _check.require(not self._generating, "decoder", "the one whose streamer or watch calls it", takes)
            try:
                self._generating = True
                yield
            finally:
                self._generating = False


def one_at_a_time(method: Callable[..., object]) -> Callable[..., object]:
    """A method of an object with a `turn`, which waits for it."""

    @functools.wraps(method)
    def turn(self: object, *args: object, **kwargs: object) -> object:
        with self.turn:
            return method(self, *args, **kwargs)

    return turn
