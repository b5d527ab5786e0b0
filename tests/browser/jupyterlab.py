"""A real JupyterLab over a copy of the notebooks, and a notebook open in it, driven as a learner drives it."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import nbformat
from playwright.sync_api import Browser, Locator, Page

from labkit.measure import Ledger, Measurement

ROOT = Path(__file__).resolve().parents[2]
# Limits for what hangs, not for what is slow: two notebooks share the cores, and labs wait for their turn to measure.
START_S = 120
KERNEL_S = 120
MEASURE_S = 300

# What would ask the reader something at the first start, and what would leave cells out of the page until scrolled to.
_SETTINGS = {
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
    "notebook-extension/tracker": '{"windowingMode": "none"}',
}
_PANEL = "window.jupyterapp.shell.currentWidget"
_KERNEL_IS_READY = f"""() => {{
    const panel = window.jupyterapp && {_PANEL};
    return panel && panel.context?.isReady && panel.sessionContext?.isReady
        && panel.sessionContext.session?.kernel?.status === 'idle';
}}"""


class JupyterServer:
    """JupyterLab on a free port of 127.0.0.1, with a token, settings of its own and a ledger of its own."""

    def __init__(self, notebooks: Path, work: Path) -> None:
        self.root, self.ledger = work / "notebooks", Ledger(work / "ledger.jsonl")
        shutil.copytree(notebooks, self.root, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
        for name, text in _SETTINGS.items():
            path = work / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{port}"
        self._log = (work / "jupyterlab.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *self._options(port, work)],
            cwd=self.root,
            env=self._environment(work),
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self._wait_until_up()

    def _options(self, port: int, work: Path) -> list[str]:
        options = ["--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
        options += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={self.root}"]
        options += [f"--LabApp.user_settings_dir={work / 'settings'}", f"--LabApp.workspaces_dir={work / 'workspaces'}"]
        options += ["--LabApp.expose_app_in_browser=True"]
        return [*options, "--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else options

    def _environment(self, work: Path) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        temporary = work / "tmp"
        temporary.mkdir()
        return os.environ | {
            "PYTHONPATH": paths,
            # With a device lock of its own: another server's labs do not wait for this one's.
            "TMPDIR": str(temporary),
            "LABKIT_LEDGER": str(self.ledger.path),
            "IPYTHONDIR": str(work / "ip"),
        }

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/api/status?token={self.token}", timeout=5).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"JupyterLab did not start:\n{Path(self._log.name).read_text()[-2000:]}")

    def stop(self) -> None:
        """End the server; its kernels end with it."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class OpenNotebook:
    """One notebook in one browser page, with its kernel running."""

    def __init__(self, server: JupyterServer, browser: Browser, name: str) -> None:
        self.server, self.name = server, name
        self.problems: list[str] = []
        self.page: Page = browser.new_page(viewport={"width": 1400, "height": 1100})
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("console", self._hear)
        # A workspace of its own: the default one would open what an earlier page left open.
        workspace = f"test-{secrets.token_hex(4)}"
        self.page.goto(f"{server.url}/lab/workspaces/{workspace}/tree/{name}?token={server.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=START_S * 1000)
        self.page.wait_for_function(_KERNEL_IS_READY, timeout=KERNEL_S * 1000)

    def clear(self) -> None:
        """Forget the outputs and counts that the file keeps, so that what is there afterwards was made now."""
        self._command("notebook:clear-all-cell-outputs", KERNEL_S)
        assert set(self.execution_counts()) <= {None}

    def _hear(self, message: object) -> None:
        if message.type == "error":
            self.problems.append(f"console error: {message.text}")

    def run_all(self, timeout_s: float) -> None:
        """Run every cell, as the menu's Run All does, and wait for the last."""
        self.clear()
        self._command("notebook:run-all-cells", timeout_s)

    def run_cell(self, index: int, timeout_s: float = MEASURE_S) -> None:
        """Run one cell and wait for it."""
        self.page.evaluate(f"index => {{ {_PANEL}.content.activeCellIndex = index; }}", index)
        self._command("notebook:run-cell", timeout_s)
        count = self.page.evaluate(f"index => {_PANEL}.content.widgets[index].model.executionCount", index)
        assert count is not None, f"cell {index} of {self.name} did not run"

    def write_cell(self, index: int, source: str) -> None:
        """Put `source` in place of what a cell holds."""
        put = f"([index, source]) => {_PANEL}.content.widgets[index].model.sharedModel.setSource(source)"
        self.page.evaluate(put, [index, source])

    def _command(self, command: str, timeout_s: float) -> None:
        start = "command => { window.done = false; window.jupyterapp.commands.execute(command)"
        self.page.evaluate(f"{start}.finally(() => {{ window.done = true; }}); }}", command)
        self.page.wait_for_function("() => window.done", timeout=timeout_s * 1000)

    def errors(self) -> list[str]:
        """Everything that went wrong: cells' errors, dialogs, labs' errors, the page's own."""
        cells = self.page.evaluate(
            f"""() => {_PANEL}.content.widgets.flatMap(cell => (cell.model.toJSON().outputs || [])
                .filter(output => output.output_type === 'error').map(output => output.ename + ': ' + output.evalue))"""
        )
        seen = [*self.problems, *(f"cell error: {error}" for error in cells)]
        for selector in (".jp-Dialog", ".labkit-error", ".jp-mod-error"):
            seen += [f"{selector}: {text}" for text in self.page.locator(selector).all_inner_texts()]
        return seen

    def execution_counts(self) -> list[int | None]:
        """Of the code cells that hold code, in order."""
        return self.page.evaluate(
            f"""() => {_PANEL}.content.widgets.map(cell => cell.model)
                .filter(model => model.type === 'code' && model.sharedModel.getSource().trim())
                .map(model => model.executionCount)"""
        )

    def slider(self, description: str) -> Locator:
        """The handle of a lab's slider, by its label."""
        row = self.page.locator(".labkit-lab .widget-slider", has=self.page.get_by_text(description, exact=True))
        return row.locator(".noUi-handle")

    def move(self, description: str, steps: int) -> None:
        """Press an arrow key on a slider, once a step."""
        handle = self.slider(description)
        handle.scroll_into_view_if_needed()
        for _ in range(abs(steps)):
            handle.press("ArrowRight" if steps > 0 else "ArrowLeft")

    def number(self, key: str) -> tuple[float, str]:
        """One of the lab's rendered numbers: its exact value, and the text that a learner reads."""
        cell = self.page.locator(f'.labkit-lab [data-key="{key}"]')
        return float(cell.get_attribute("data-exact")), cell.inner_text()

    def wait_measured(self) -> None:
        """Wait until the lab says that it has measured; AssertionError with what is wrong where something is."""
        done = self.page.locator(".labkit-lab .labkit-status", has_text="Measured in")
        deadline = time.monotonic() + MEASURE_S
        while not done.count():
            assert time.monotonic() < deadline, f"nothing measured in {MEASURE_S} s; {self.errors()}"
            assert not self.errors(), self.errors()
            self.page.wait_for_timeout(100)

    def wait_for_ledger(self, wanted: Callable[[Measurement], bool], after: int) -> Measurement:
        """The first ledger line past the first `after` that is `wanted`."""
        deadline = time.monotonic() + MEASURE_S
        while time.monotonic() < deadline:
            for line in self.server.ledger.read()[after:]:
                if wanted(line):
                    return line
            self.page.wait_for_timeout(100)
        raise AssertionError(
            f"no such ledger line; the lab says {self.page.locator('.labkit-status').all_inner_texts()}"
        )

    def close(self) -> None:
        """End the kernel, then the page."""
        self.page.evaluate(f"() => {_PANEL}.sessionContext.shutdown()")
        self.page.close()


def write_notebook(path: Path, *sources: str) -> None:
    """A notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
