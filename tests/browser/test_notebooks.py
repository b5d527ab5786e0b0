"""Every notebook, opened in JupyterLab; one run there from the first cell to the last.

nbval runs every cell of every chapter without a page, and each lab has a test of its own in one. So only the first
chapter is run whole here; with LABKIT_BROWSER_RUN_ALL=1 all are, which takes some twelve minutes more.
"""

import os

import pytest

from tests.browser.jupyterlab import ROOT

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
RUN_WHOLE = NOTEBOOKS if os.environ.get("LABKIT_BROWSER_RUN_ALL") else NOTEBOOKS[:1]
RUN_ALL_S = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_opens_and_runs_all_without_an_error(name, open_notebook, artifacts):
    notebook = open_notebook(name)
    assert notebook.errors() == []
    assert all(notebook.execution_counts()), "it shows outputs before anything is run"
    if name in RUN_WHOLE:
        notebook.run_all(RUN_ALL_S)
        counts = notebook.execution_counts()
        assert counts == list(range(1, len(counts) + 1))
    notebook.page.screenshot(path=artifacts / f"{name.removesuffix('.ipynb')}.png")
    assert notebook.errors() == []
