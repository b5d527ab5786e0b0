"""The browser and the JupyterLab that the tests drive, each started once."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.jupyterlab import ROOT, JupyterServer, OpenNotebook, write_notebook
from tests.browser.lab import OpenLab

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARTIFACTS = ROOT / "artifacts" / "browser"
_LABS_SETUP = """\
from labkit import labs
from labkit.corpora import load_text
from labkit.hardware import set_threads
set_threads()"""


# What takes longest comes first, so that two processes end at about the same time.
_LONGEST = ("stack", "speculative", "eviction", "flash_attention", "sampling", "quantization")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.browser)
    ranks = {f"test_{name}_lab.py": rank for rank, name in enumerate(_LONGEST)}
    own.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    items[:] = [item for item in items if here not in item.path.parents] + own


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, headless. Without one the tests skip; under REQUIRE_BROWSER=1 they fail."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        reason = f"no Chromium: none of {', '.join(_NAMES)} is on the PATH. Debian, Ubuntu: apt-get install chromium"
        (pytest.fail if os.environ.get("REQUIRE_BROWSER") == "1" else pytest.skip)(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*_ARGS, "--disable-sync"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterServer]:
    """JupyterLab over a copy of notebooks/, so that no test writes to the repository."""
    server = JupyterServer(ROOT / "notebooks", tmp_path_factory.mktemp("jupyter"))
    yield server
    server.stop()


@pytest.fixture
def open_notebook(server: JupyterServer, browser: Browser) -> Iterator[Callable[[str], OpenNotebook]]:
    """Open a notebook by its name; whatever a test opened is closed at its end."""
    opened: list[OpenNotebook] = []

    def open_(name: str) -> OpenNotebook:
        opened.append(OpenNotebook(server, browser, name))
        return opened[-1]

    yield open_
    for notebook in opened:
        notebook.close()


@pytest.fixture(scope="session")
def _labs(server: JupyterServer, browser: Browser) -> Iterator[OpenNotebook]:
    """A notebook in which one lab after another is shown: to import and to load takes longer than most labs' moves."""
    write_notebook(server.root / "labs.ipynb", _LABS_SETUP, "")
    notebook = OpenNotebook(server, browser, "labs.ipynb")
    notebook.run_cell(0)
    yield notebook
    notebook.close()


@pytest.fixture(scope="module")
def open_lab(_labs: OpenNotebook) -> Callable[..., OpenLab]:
    """Show the lab that `source` makes, in place of the one before, and wait for its first result."""

    def open_(source: str, name: str, default: dict[str, object], last: str, height: int = 1500) -> OpenLab:
        _labs.page.set_viewport_size({"width": 1400, "height": height})
        _labs.problems.clear()  # of the lab before
        _labs.clear()
        _labs.write_cell(1, source)
        _labs.run_cell(1)
        _labs.wait_measured()
        assert _labs.errors() == []
        return OpenLab(_labs, name, default, last)

    return open_


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Where screenshots are kept; git ignores it."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    return ARTIFACTS
