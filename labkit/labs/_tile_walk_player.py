"""A knob that walks by itself: a slider over steps, and a button that plays it."""

from __future__ import annotations

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
    """`value` is the slider's, from 0 to `steps`; the button moves it."""

    value = traitlets.Int()

    def __init__(self, steps: int, value: int) -> None:
        self.play = PlayButton(max=steps, value=value)
        self.slider = widgets.IntSlider(
            min=0,
            max=steps,
            value=value,
            description="Tile",
            continuous_update=False,
            layout={"width": "330px"},
            style={"description_width": "40px"},
        )
        # In the page, so that a step that is late in the kernel holds nothing up.
        self._in_page = widgets.jslink((self.play, "value"), (self.slider, "value"))
        super().__init__([self.play, self.slider], layout={"align_items": "center"})
        self._linked = traitlets.link((self.slider, "value"), (self, "value"))

    @property
    def steps(self) -> int:
        """The last step."""
        return self.slider.max

    def resize(self, steps: int) -> None:
        """Another walk: stop playing, and stand as far along it as before, at its end if that was the end."""
        self.play.playing = False
        value = round(self.value * steps / self.steps)
        parts = (self.play, self.slider)
        for part in parts:  # none may stand past its end, not for a moment
            part.max = max(steps, part.value)
        for part in parts:
            part.value = value
        for part in parts:
            part.max = steps
