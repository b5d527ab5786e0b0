"""Threads that share a Decoder take turns: two that wrote to one cache at once would both read wrong tokens."""

import functools
import threading
from collections.abc import Callable

from labkit import _check


class Turn:
    """A lock that its holder may take again, but not out of a streamer or watch that it is telling.

    Such a step would change the cache that the generation which feeds the streamer goes on with.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._telling = False

    def __enter__(self) -> None:
        self._lock.acquire()
        telling = self._telling  # then this is the holder's own thread: others still wait in the line above
        if telling:
            self._lock.release()
        takes = "another Decoder: this one is in the middle of a generation"
        _check.require(not telling, "decoder", "the one whose streamer or watch calls it", takes)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def tell(self, hear: Callable[..., None], *news: object) -> None:
        """Call `hear(*news)` in the middle of a generation, by the one whose turn it is. Errors: ValueError for every
        step that `hear` asks of the Decoder."""
        self._telling = True
        try:
            hear(*news)
        finally:
            self._telling = False


def one_at_a_time(method: Callable[..., object]) -> Callable[..., object]:
    """A method of an object with a `turn`, which waits for it."""

    @functools.wraps(method)
    def turn(self: object, *args: object, **kwargs: object) -> object:
        with self.turn:
            return method(self, *args, **kwargs)

    return turn
