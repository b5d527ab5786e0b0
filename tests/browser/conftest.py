"""The browser and the JupyterLab that the tests drive, each started once."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.jupyterlab import ROOT, JupyterServer, OpenNotebook

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
ARTIFACTS = ROOT / "artifacts" / "browser"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


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


def _opener(server: JupyterServer, browser: Browser) -> Iterator[Callable[..., OpenNotebook]]:
    """A function that opens a notebook by its name; whatever it opened is closed at the end."""
    opened: list[OpenNotebook] = []

    def open_(name: str, **options: int) -> OpenNotebook:
        opened.append(OpenNotebook(server, browser, name, **options))
        return opened[-1]

    yield open_
    for notebook in opened:
        notebook.close()


@pytest.fixture
def open_notebook(server: JupyterServer, browser: Browser) -> Iterator[Callable[..., OpenNotebook]]:
    """Open a notebook by its name, for one test."""
    yield from _opener(server, browser)


@pytest.fixture(scope="module")
def open_for_module(server: JupyterServer, browser: Browser) -> Iterator[Callable[..., OpenNotebook]]:
    """Open a notebook by its name, once for all tests of a file."""
    yield from _opener(server, browser)


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Where screenshots are kept; git ignores it."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    return ARTIFACTS
