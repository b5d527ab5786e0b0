"""The "predict first" box: a guess is asked for before the measurement that answers it is shown."""

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ipywidgets as widgets

from labkit.labs._result import LabResult


@dataclass(frozen=True)
class Prediction:
    """A question with a few answers to choose from, and what the measurements say.

    `answer` gets every finished result of the lab, oldest first, and returns one sentence, or None while they do not
    settle the question yet.
    """

    question: str
    options: tuple[str, ...]
    answer: Callable[[Sequence[LabResult]], str | None]


class PredictionBox(widgets.VBox):
    """Shows the question; holds the measured answer back until a guess is made."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self._answer: str | None = None
        question = widgets.HTML(f"<b>Predict first.</b> {html.escape(prediction.question)}")
        self.guess = widgets.ToggleButtons(options=prediction.options, value=None, style={"button_width": "auto"})
        self.guess.observe(lambda _: self._show(), "value")
        self._verdict = widgets.HTML()
        super().__init__([widgets.HBox([question, self.guess], layout={"flex_flow": "row wrap"}), self._verdict])
        self.add_class("labkit-prediction")
        self._show()

    def update(self, results: Sequence[LabResult]) -> None:
        """Take in what has been measured by now."""
        self._answer = self._prediction.answer(results)
        self._show()

    def clear(self) -> None:
        """Forget the guess and the measurements."""
        self._answer = None
        self.guess.value = None
        self._show()

    def _show(self) -> None:
        guess = self.guess.value
        if guess is None:
            text = "" if self._answer is None else "Measured. Choose your guess to see the answer."
        elif self._answer is None:
            text = f"Your guess: {guess}. Now measure it."
        else:
            text = f"Your guess: {guess}. Measured: {self._answer}"
        self._verdict.value = f"<span>{html.escape(text)}</span>"
