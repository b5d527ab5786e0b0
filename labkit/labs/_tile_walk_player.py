"""A knob that walks by itself: a slider over steps, and a button that plays it."""

from __future__ import annotations

from collections.abc import Mapping

import anywidget
import ipywidgets as widgets
import traitlets

# Long enough to see what a step changed; on two cores a step is measured and drawn in less.
INTERVAL_MS = 500


class PlayButton(anywidget.AnyWidget):
    """Counts `value` up to `max` in the page while `playing`, one an interval; played at its end, it begins at 0.

    `ipywidgets.Play` stops after its first step wherever it has two views, and a lab that takes a while to start has:
    the one that shows it starting, and the one with its result. Here the clock is the model's, not a view's.
    """

    value, max = traitlets.Int().tag(sync=True), traitlets.Int().tag(sync=True)
    playing = traitlets.Bool(False).tag(sync=True)
    interval = traitlets.Int(INTERVAL_MS).tag(sync=True)

    _esm = """
    function initialize({ model }) {
        let timer;
        const tick = () => {
            const next = Math.min(model.get("value") + 1, model.get("max"));
            model.set("value", next);
            if (next === model.get("max")) model.set("playing", false);
            model.save_changes();
        };
        const follow = () => {
            clearInterval(timer);
            if (!model.get("playing")) return;
            if (model.get("value") >= model.get("max")) model.set("value", 0);
            timer = setInterval(tick, model.get("interval"));
        };
        model.on("change:playing", follow);
        return () => { clearInterval(timer); model.off("change:playing", follow); };
    }
    function render({ model, el }) {
        const button = document.createElement("button");
        button.className = "jupyter-button labkit-play";
        button.title = "Visit one tile after another";
        button.style.width = "88px";
        const show = () => { button.textContent = model.get("playing") ? "Pause" : "▶ Play"; };
        button.onclick = () => { model.set("playing", !model.get("playing")); model.save_changes(); };
        model.on("change:playing", show);
        show();
        el.append(button);
        return () => model.off("change:playing", show);
    }
    export default { initialize, render };
    """


class StepPlayer(widgets.HBox):
    """`value` is the step, from 0 to `steps`; the slider and the button's clock move it, and it moves them.

    Only the clock runs in the page. Linked to each other there, button and slider would send back each value that the
    kernel sets, and of two in a row the first might come back last.
    """

    value = traitlets.Int()

    def __init__(self, steps: int, value: int) -> None:
        self.play = PlayButton(max=steps, value=value)
        self.slider = _slider(steps, value)
        super().__init__([self.play, self.slider], value=value, layout={"align_items": "center"})
        self.play.observe(self._ticked, "value")
        self.slider.observe(self._slid, "value")

    @property
    def steps(self) -> int:
        """The last step."""
        return self.play.max

    def stop(self) -> None:
        """Stop playing."""
        self.play.playing = False

    def resize(self, steps: int) -> None:
        """Another walk: stop playing, and stand as far along it as before, at its end if that was the end."""
        self.stop()
        value = round(self.value * steps / self.steps)
        old, self.slider = self.slider, _slider(steps, value)
        self.slider.observe(self._slid, "value")
        # Not the old slider with another end: in the page its End key would still go to the old one.
        self.children = (self.play, self.slider)
        old.close()
        self.play.max = steps
        self.value = value

    def _ticked(self, change: Mapping[str, int]) -> None:
        """Follow the clock. A tick that was on its way when the clock was stopped here is none of this walk; the last
        of a walk comes with the clock's own stop."""
        if self.play.playing or change["new"] == self.steps:
            self.value = change["new"]
        else:
            self.play.value = self.value

    def _slid(self, change: Mapping[str, int]) -> None:
        self.value = change["new"]

    @traitlets.validate("value")
    def _within(self, proposal: Mapping[str, int]) -> int:
        return min(max(proposal["value"], 0), self.steps)

    @traitlets.observe("value")
    def _show(self, change: Mapping[str, int]) -> None:
        self.slider.value = self.play.value = change["new"]


def _slider(steps: int, value: int) -> widgets.IntSlider:
    return widgets.IntSlider(
        min=0,
        max=steps,
        value=value,
        description="Tile",
        continuous_update=False,
        layout={"width": "330px"},
        style={"description_width": "40px"},
    )
