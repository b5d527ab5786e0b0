"""The parts of a lab that show something: status line, numbers, and the style they share."""

import html
from collections.abc import Sequence
from itertools import groupby

import anywidget
import ipywidgets as widgets

from labkit.labs._figures import BLUE, ERROR
from labkit.labs._result import Number, Progress

# Lab colours follow JupyterLab's theme where it sets one; the fallbacks are its light theme.
_COLOURED = f"""<style>
.labkit-prediction {{ border-left: 4px solid {BLUE}; padding: 2px 0 2px 10px; margin: 6px 0; }}
.labkit-status.labkit-error {{ color: {ERROR}; font-weight: 600; white-space: pre-wrap; }}
"""
STYLE = (
    _COLOURED
    + """.labkit-lab { padding: 4px 2px; }
.labkit-title { font-size: 18px; font-weight: 600; line-height: 1.3; }
.labkit-how { font-size: 14px; line-height: 1.45; max-width: 70em; }
.labkit-lab .widget-label, .labkit-lab .widget-readout, .labkit-lab .widget-html-content,
.labkit-lab .jupyter-button { font-size: 14px; }
.labkit-status { font-size: 14px; line-height: 1.4; }
.labkit-groups { display: flex; flex-wrap: wrap; gap: 6px 24px; align-items: flex-start; }
.labkit-groups table { flex: 1 1 400px; border-collapse: collapse; font-size: 14px; line-height: 1.45; }
.labkit-groups caption { text-align: left; font-weight: 600; padding-bottom: 2px; }
.labkit-groups td { padding: 0 10px 0 0; text-align: left; border: none; white-space: nowrap; }
.labkit-groups td.labkit-value { text-align: right; font-variant-numeric: tabular-nums; font-weight: 600; }
.labkit-groups td.labkit-note { width: 100%; white-space: normal; color: var(--jp-ui-font-color2, #616161); }
.labkit-export { display: inline-block; padding: 0 12px; line-height: 28px; font-size: 14px; text-decoration: none;
  color: var(--jp-ui-font-color1, #212121); background: var(--jp-layout-color2, #eee); }
.labkit-export:hover { box-shadow: 0 2px 4px rgb(0 0 0 / 25%); }
</style>"""
)


class Refit(anywidget.AnyWidget):
    """Nothing to see: makes the figures beside it as wide as the notebook, whenever that or they change.

    plotly draws a figure before it stands on the page, where there is no width to take, and then listens to the window.
    """

    _esm = """
    function render({ el }) {
        const refit = () => window.dispatchEvent(new Event("resize"));
        const watch = new ResizeObserver(refit);
        watch.observe(el);
        document.addEventListener("plotlywidget-after-render", refit);
        return () => {
            watch.disconnect();
            document.removeEventListener("plotlywidget-after-render", refit);
        };
    }
    export default { render };
    """


class StatusLine(widgets.HBox):
    """One line that says what is running, with a bar, or what went wrong."""

    def __init__(self) -> None:
        self._text = widgets.HTML()
        self._bar = widgets.FloatProgress(min=0.0, max=1.0, layout={"width": "180px", "display": "none"})
        layout = {"min_height": "34px", "align_items": "center", "margin": "0 0 0 12px"}
        super().__init__([self._bar, self._text], layout=layout)

    @property
    def text(self) -> str:
        """What the line says, as HTML."""
        return self._text.value

    def running(self, progress: Progress) -> None:
        """Show what runs; a bar that does not know how far it is stands full and striped."""
        self._bar.bar_style = "" if progress.fraction is not None else "info"
        self._bar.value = 1.0 if progress.fraction is None else progress.fraction
        self._bar.layout.display = ""
        self._write(progress.text)

    def done(self, text: str) -> None:
        """Show a sentence and no bar."""
        self._bar.layout.display = "none"
        self._write(text)

    def error(self, error: BaseException) -> None:
        """Show an error. A ValueError speaks for itself; any other is named by its type."""
        if isinstance(error, KeyboardInterrupt):
            text = "Interrupted. Move a knob to measure again."
        else:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        self._bar.layout.display = "none"
        self._write(text, "labkit-error")

    def _write(self, text: str, extra: str = "") -> None:
        self._text.value = f'<div class="labkit-status {extra}" role="status">{html.escape(text)}</div>'


def numbers_html(numbers: Sequence[Number]) -> str:
    """Tables of a result's numbers side by side, one a group; every text is escaped."""
    tables = []
    for group, members in groupby(numbers, key=lambda number: number.group):
        rows = "".join(
            f"<tr><td>{html.escape(n.label)}</td>"
            f'<td class="labkit-value" data-key="{html.escape(n.key)}" data-exact="{n.exact!r}">'
            f'{html.escape(n.text)}</td><td class="labkit-note">{html.escape(n.note)}</td></tr>'
            for n in members
        )
        tables.append(f"<table><caption>{html.escape(group)}</caption>{rows}</table>")
    return f'<div class="labkit-groups">{"".join(tables)}</div>'
