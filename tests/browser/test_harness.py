"""The harness itself: it sees an error where there is one, and a missing browser is a skip only where it may be."""

import os
import struct
import subprocess
import sys

import plotly.graph_objects as go
import pytest

from labkit.labs._figures import to_png
from tests.browser.jupyterlab import ROOT, write_notebook


def test_an_error_in_a_cell_is_seen(server, open_notebook):
    write_notebook(server.root / "broken.ipynb", "x = 1", "x / 0", "print('never')")
    notebook = open_notebook("broken.ipynb")
    assert notebook.errors() == []
    notebook.run_all(60)
    assert [error for error in notebook.errors() if "cell error: ZeroDivisionError" in error]
    # What follows is not run where its request was queued already; on a busy machine it may come after the error.
    assert notebook.execution_counts()[:2] == [1, 2]


def test_an_error_in_a_lab_is_seen(server, open_notebook):
    source = "import ipywidgets\nipywidgets.HTML('<div class=\"labkit-error\">too large</div>')"
    write_notebook(server.root / "broken_lab.ipynb", source)
    notebook = open_notebook("broken_lab.ipynb")
    notebook.run_all(60)
    notebook.page.wait_for_selector(".labkit-error")
    assert notebook.errors() == [".labkit-error: too large"]


@pytest.mark.parametrize(("required", "status", "says"), [("0", 0, "skipped"), ("1", 1, "error")])
def test_without_a_browser_it_skips_or_fails_and_says_how_to_get_one(tmp_path, required, status, says):
    command = [sys.executable, "-m", "pytest", "-rsE", "-p", "no:cacheprovider", "tests/browser/test_notebooks.py"]
    env = os.environ | {"PATH": str(tmp_path), "REQUIRE_BROWSER": required, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == status, run.stdout
    assert says in run.stdout.splitlines()[-1]
    assert "no Chromium" in run.stdout and "apt-get install chromium" in run.stdout


def test_a_figure_becomes_a_png(browser):
    """With a browser there is a picture: the one that stays in a notebook's outputs."""
    pictures = []
    for colour in ("red", "blue"):
        figure = go.Figure(go.Scatter(x=[1, 2], y=[1, 2], line={"color": colour, "width": 10}))
        pictures.append(to_png(figure, width=400, height=300))
    for picture in pictures:
        assert picture[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", picture[16:24]) == (400, 300)
    assert pictures[0] != pictures[1]
