"""The rungs as toggle buttons, in the ladder's order; those that do not go with the others say why."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping

import ipywidgets as widgets
import traitlets

from labkit.engine.ladder import RUNGS


class RungToggles(widgets.VBox):
    """A button a rung, and two that turn all on or off. `value` is what is asked for, in the ladder's order; `refused`
    says of it which rungs are left out, with the reason, which is shown below."""

    value = traitlets.Tuple()

    def __init__(self, value: tuple[str, ...], refused: Callable[[tuple[str, ...]], Mapping[str, str]]) -> None:
        self._refused = refused
        self._quiet = False
        self.buttons = {
            rung.name: widgets.ToggleButton(
                description=rung.title,
                tooltip=f"{rung.does}. Attacks: {rung.attacks}. Built in chapter {rung.chapter:02d}",
                layout={"width": "auto"},
            )
            for rung in RUNGS.values()
        }
        for button in self.buttons.values():
            button.observe(lambda _: self._pressed(), "value")
        self.everything, self.nothing = (self._shortcut(name, to) for name, to in (("all", tuple(RUNGS)), ("none", ())))
        self.reasons = widgets.HTML()
        row = [widgets.Label("Rungs"), *self.buttons.values(), self.everything, self.nothing]
        layout = {"flex_flow": "row wrap", "align_items": "center"}
        super().__init__([widgets.HBox(row, layout=layout), self.reasons], layout={"width": "100%"})
        self.add_class("labkit-rungs")
        self.observe(lambda _: self._show(), "value")
        self.value = tuple(value)
        self._show()

    def _shortcut(self, name: str, to: tuple[str, ...]) -> widgets.Button:
        button = widgets.Button(description=name, tooltip=f"Turn {name} of them on", layout={"width": "auto"})
        button.on_click(lambda _: setattr(self, "value", to))
        return button

    def _pressed(self) -> None:
        if not self._quiet:
            self.value = tuple(name for name, button in self.buttons.items() if button.value)

    def _show(self) -> None:
        """Buttons, marks and reasons as the value says."""
        refused = self._refused(self.value)
        self._quiet = True
        try:
            for name, button in self.buttons.items():
                button.value = name in self.value
                # A mark beside the colour, so that neither is needed to tell them apart.
                button.icon = "ban" if name in refused else "check" if button.value else ""
                button.button_style = "warning" if name in refused else "info" if button.value else ""
        finally:
            self._quiet = False
        self.reasons.value = " ".join(_reason(name, why) for name, why in refused.items())


def _reason(name: str, why: str) -> str:
    said = f"<b>{html.escape(RUNGS[name].title)} is left out</b>: {html.escape(why)}."
    return f'<div class="labkit-left-out" data-rung="{html.escape(name)}">{said}</div>'
