"""What every lab shares: knobs, status, numbers, figure, history, ledger, CSV, and the bundle a notebook keeps.

A lab is build, compute, draw. The `LabSpec` says how this one does each; `Lab` binds them: a moved knob measures in
one worker thread where the latest setting wins, each result is shown as it firms up, each final one joins the history
and the ledger, and an error is shown and forgotten with the next move.
"""

import base64
import contextlib
import html
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import ipywidgets as widgets
from IPython.display import display

from labkit.labs._figures import to_png
from labkit.labs._live_figure import LiveFigure
from labkit.labs._prediction import PredictionBox
from labkit.labs._result import LabResult, Progress, to_csv
from labkit.labs._spec import LabSpec
from labkit.labs._view import STYLE, Refit, StatusLine, numbers_html
from labkit.labs._worker import LatestWorker, Run
from labkit.measure import Ledger, device_lock

# Long enough for a model to be converted on first use; a display never blocks the notebook longer.
_BUNDLE_WAIT_S = 180.0


class Lab(widgets.VBox):
    """The widget. It measures its default setting as soon as it is made; `wait()` blocks until it stands.

    `result` is the latest result, `finished` all final ones since the last reset, `error` and `traceback` what the
    latest setting failed with.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.error: BaseException | None = None
        self.traceback = ""
        self.result: LabResult | None = None
        self.finished: tuple[LabResult, ...] = ()
        self._defaults = {name: knob.value for name, knob in spec.controls.items()}
        self._quiet = False
        self._history_lock = threading.Lock()
        self._png: tuple[LabResult | None, bytes | None] = (None, None)
        self._worker = LatestWorker(self._measure)
        self.figure = LiveFigure(spec.figure())
        super().__init__(self._build(), layout={"width": "100%"})
        self.add_class("labkit-lab")
        for knob in spec.controls.values():
            if hasattr(knob, "continuous_update"):
                knob.continuous_update = False
            knob.observe(self._moved, "value")
        self.measure()

    def _build(self) -> list[widgets.Widget]:
        """Lay the parts out, top to bottom."""
        spec = self.spec
        head = f'<div class="labkit-title">{html.escape(spec.title)}</div>'
        how = f'<div class="labkit-how">{html.escape(spec.how)}</div>'
        self._again = widgets.Button(description="Measure again", tooltip="Measure this setting once more")
        self._again.on_click(lambda _: self.stop() if self._worker.busy else self.measure())
        reset = widgets.Button(description="Reset", tooltip="Back to the first setting, with an empty figure")
        reset.on_click(lambda _: self.reset())
        for button in (self._again, reset):
            button.layout.width = "auto"
        self._export = widgets.HTML()
        self.status = StatusLine()
        self.numbers = widgets.HTML()
        self.prediction = PredictionBox(spec.prediction) if spec.prediction else None
        controls = widgets.HBox([*spec.controls.values()], layout={"flex_flow": "row wrap"})
        actions = widgets.HBox([self._again, reset, self._export, self.status], layout={"align_items": "center"})
        parts = [widgets.HTML(STYLE + head + how), self.prediction, controls, actions, self.numbers]
        parts += [self.figure, Refit(layout={"width": "100%"})]
        self._offer_csv()
        return [part for part in parts if part is not None]

    def measure(self) -> None:
        """Measure the setting that the knobs show."""
        self.status.running(Progress("Starting"))
        self._again.description = "Stop"
        self._worker.submit({name: knob.value for name, knob in self.spec.controls.items()})

    def stop(self) -> None:
        """Cancel what is being measured; what stands on the figure stays."""
        self._worker.stop()
        self.status.done("Stopped. Move a knob or press Measure again.")
        self._again.description = "Measure again"

    def reset(self) -> None:
        """Put the knobs back, forget the finished results (the ledger keeps them), and measure."""
        with self._history_lock:
            self._worker.stop()
            self.finished = ()
        self._quiet = True
        try:
            for name, knob in self.spec.controls.items():
                knob.value = self._defaults[name]
        finally:
            self._quiet = False
        self._offer_csv()
        if self.prediction:
            self.prediction.clear()
        self.measure()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until nothing is being measured; False when `timeout` seconds pass first."""
        return self._worker.wait(timeout)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Every finished result since the last reset as CSV; also written to `path` where one is given."""
        text = to_csv(self.finished)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _moved(self, _: object) -> None:
        if not self._quiet:
            self.measure()

    def _measure(self, values: Mapping[str, object], run: Run) -> None:
        """One setting, in the worker thread, from parameters to ledger."""
        begin = time.perf_counter()
        self.error, self.traceback = None, ""
        try:
            params = self.spec.params(**values)
            # Held for the whole setting: the time_op calls inside re-enter it, and nobody's run comes between them.
            with self._turn():
                final = self._follow(params, run)
            self._finish(final, run, time.perf_counter() - begin)
        except (Exception, KeyboardInterrupt) as error:
            if not run.cancelled():
                self.traceback = traceback.format_exc()
                # Without its frames, which would keep the tensors of a failed run alive.
                self.error = error.with_traceback(None)
                self.status.error(error)
        if not run.cancelled():
            self._again.description = "Measure again"

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """This lab's turn on its device; it says that it waits."""
        waiting = Progress("Waiting for another run on this device")
        device = self.spec.device
        return device_lock(device, lambda: self.status.running(waiting)) if device else contextlib.nullcontext()

    def _follow(self, params: object, run: Run) -> LabResult | None:
        """Run `compute`, showing each step; the last result, or None when it was cancelled."""
        final = None
        if run.cancelled():
            return None
        with contextlib.closing(self.spec.compute(params, run.cancelled)) as steps:
            for step in steps:
                if run.cancelled():
                    return None
                if isinstance(step, Progress):
                    self.status.running(step)
                else:
                    final = step
                    self._show(step)
        return None if run.cancelled() else final

    def _show(self, result: LabResult) -> None:
        self.result = result
        self.numbers.value = numbers_html(result.numbers())
        with self.figure.drawing():
            self.spec.draw(self.figure, result, self.finished)

    def _finish(self, result: LabResult | None, run: Run, seconds: float) -> None:
        """Append to the history and the ledger; a run that was cancelled meanwhile leaves neither."""
        with self._history_lock:
            if result is None or run.cancelled():
                return
            self.finished += (result,)
        self._offer_csv()
        if self.prediction:
            self.prediction.update(self.finished)
        # Last: where the ledger cannot be written, the lab says so and still holds what it measured.
        ledger = Ledger()
        for measurement in result.measurements():
            ledger.append(measurement)
        self.status.done(f"Measured in {seconds:.1f} s. Move a knob; earlier points stay, faded.")

    def _offer_csv(self) -> None:
        """Put what has been measured behind the Export CSV button, so that one click saves it."""
        data = base64.b64encode(self.to_csv().encode()).decode()
        self._export.value = (
            f'<a class="labkit-export" download="{html.escape(self.spec.name)}.csv" '
            f'href="data:text/csv;base64,{data}" title="Everything measured since the last reset">Export CSV</a>'
        )

    def _settle(self) -> None:
        """Wait for the setting at hand; an interrupt of the cell stops the measurement and is shown."""
        try:
            self.wait(_BUNDLE_WAIT_S)
        except KeyboardInterrupt as interrupt:
            self.stop()
            self.status.error(interrupt)

    def _repr_mimebundle_(self, **kwargs: object) -> dict[str, object]:
        """The widget's view; the result as text; the figure as a picture where one can be drawn."""
        self._settle()
        bundle = super()._repr_mimebundle_(**kwargs) or {}
        missing = str(self.error) if self.error else "not measured yet"
        bundle["text/plain"] = self.result.text() if self.result else f"{self.spec.title}: {missing}"
        if self.result and self._png[0] is not self.result:
            self._png = (self.result, to_png(self.figure))
        if self.result and self._png[1]:
            bundle["image/png"] = base64.b64encode(self._png[1]).decode()
        return bundle

    def _ipython_display_(self, **kwargs: object) -> None:
        """Show the view at once, so that the first measurement is seen at work; then put the bundle in its place."""
        if self.wait(0.3):
            display(self._repr_mimebundle_(), raw=True)
            return
        handle = display(super()._repr_mimebundle_(), raw=True, display_id=True)
        handle.update(self._repr_mimebundle_(), raw=True)
