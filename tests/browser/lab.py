"""One lab in a real JupyterLab, driven as a learner drives it, and the ledger's lines that its measuring leaves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Locator, Page

from labkit.measure import Measurement
from tests.browser.jupyterlab import OpenNotebook

DRAWN_MS = 30_000
_HOLDS = """([name, axis, values]) => {
    const plot = document.querySelector('.labkit-lab .js-plotly-plot');
    const held = plot?.data?.find(trace => trace.name === name)?.[axis];
    const fills = plot?._fullLayout?.width > 0.9 * plot?.closest('.labkit-lab').clientWidth;
    if (typeof values === 'number') return fills && held?.length === values;
    return fills && JSON.stringify(held && Array.from(held)) === JSON.stringify(values);
}"""


@dataclass(frozen=True)
class OpenLab:
    """The lab that `notebook` shows.

    default: what the ledger holds as parameters of its first setting. last: the ledger's name, without the lab's, of
    the line that a measured setting writes last.
    """

    notebook: OpenNotebook
    name: str
    default: Mapping[str, object]
    last: str

    @property
    def page(self) -> Page:
        return self.notebook.page

    def number(self, key: str) -> tuple[float, str]:
        """One of the lab's rendered numbers: its exact value, and the text that a learner reads."""
        return self.notebook.number(key)

    def push(self, slider: str, steps: int) -> None:
        """Move a slider by keyboard, and do not wait: the next setting takes this one's place."""
        self.notebook.move(slider, steps)

    def pick(self, description: str, option: str | int) -> None:
        """Choose from a list by name or by place, and do not wait."""
        which = {"index": option} if isinstance(option, int) else {"label": option}
        self.page.locator(".labkit-lab").get_by_label(description, exact=True).select_option(**which)

    def after(self, act: Callable[[], object], **changed: object) -> dict[str, Measurement]:
        """Do something, and wait until the setting that differs so from the first one is measured; returns the
        ledger's lines of it, by name."""
        before, setting = len(self.notebook.server.ledger.read()), {**self.default, **changed}
        act()
        self.notebook.wait_for_ledger(lambda line: self.is_last(line, setting), before)
        self.notebook.wait_measured()
        assert self.notebook.errors() == []
        lines = [line for line in self.notebook.server.ledger.read()[before:] if line.params.items() >= setting.items()]
        return {line.name.removeprefix(f"{self.name}."): line for line in lines}

    def is_last(self, line: Measurement, setting: Mapping[str, object]) -> bool:
        """Whether a line of the ledger is the last of a setting with at least these parameters."""
        return line.name == f"{self.name}.{self.last}" and line.params.items() >= setting.items()

    def move(self, slider: str, steps: int, **changed: object) -> dict[str, Measurement]:
        """Move a slider and wait, as `after` does."""
        return self.after(lambda: self.push(slider, steps), **changed)

    def choose(self, description: str, option: str | int, **changed: object) -> dict[str, Measurement]:
        """Choose from a list and wait, as `after` does."""
        return self.after(lambda: self.pick(description, option), **changed)

    def button(self, text: str) -> Locator:
        return self.page.locator(".labkit-lab button", has_text=text)

    def guess(self, option: str) -> None:
        self.page.locator(".labkit-prediction .widget-toggle-button", has_text=option).click()

    def wait_answer(self, text: str) -> None:
        """Wait for what the lab says of the guess."""
        self.page.locator(".labkit-prediction", has_text=text).wait_for(timeout=DRAWN_MS)

    def wait_drawn(self, trace: str, values: Sequence[object] | int, axis: str = "x") -> None:
        """Wait until a trace of the figure on the page holds these values, or so many, in a figure as wide as the lab.

        The figure's data come in messages of their own, after the line that says that the lab has measured.
        """
        self.page.wait_for_function(_HOLDS, arg=[trace, axis, values], timeout=DRAWN_MS)

    def picture(self, path: Path) -> None:
        """A screenshot of the lab, with no pointer over it."""
        self.page.mouse.move(0, 0)
        self.page.locator(".labkit-lab").screenshot(path=path)
