"""The figure of a lab: a worker thread draws it while the kernel's own thread hears what the page made of it."""

import contextlib
import copy
import threading
from collections.abc import Iterator

import plotly.graph_objects as go


class LiveFigure(go.FigureWidget):
    """A FigureWidget that two threads may use: one of them draws, or takes in what the page says, at a time.

    The page answers each drawing with the defaults that it filled in, and plotly strikes those out of the very dicts
    that the next drawing reads and writes: unguarded, "dictionary changed size during iteration", or a KeyError.
    """

    def __init__(self, figure: go.Figure) -> None:
        self._turn = threading.RLock()
        super().__init__(figure)
        self.layout.autosize = True
        self._config = self._config | {"responsive": True, "displaylogo": False}

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Change the figure in this block; the page gets the changes at its end, in one message.

        plotly sends changes as messages, which a page drops that is still loading the widget's code. So the state that
        such a page reads when it first draws holds them too; without it, a lab whose first result came before that
        would stay empty until the next one.
        """
        with self._turn:
            with self.batch_update():
                yield
            self._widget_data = copy.deepcopy(self._data)
            self._widget_layout = copy.deepcopy(self._layout)

    def set_state(self, sync_data: dict[str, object]) -> None:
        """Take in what the page says, between two drawings."""
        with self._turn:
            super().set_state(sync_data)

    def to_dict(self) -> dict[str, object]:
        """As plotly's, between two drawings."""
        with self._turn:
            return super().to_dict()
