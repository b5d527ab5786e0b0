"""Every notebook, opened in JupyterLab and run from the first cell to the last."""

import pytest

from tests.browser.jupyterlab import ROOT

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
RUN_ALL_S = 600


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_opens_and_runs_all_without_an_error(name, open_notebook, artifacts):
    notebook = open_notebook(name)
    assert notebook.errors() == []
    notebook.run_all(RUN_ALL_S)
    counts = notebook.execution_counts()
    notebook.page.screenshot(path=artifacts / f"{name.removesuffix('.ipynb')}.png")
    assert notebook.errors() == []
    assert counts == list(range(1, len(counts) + 1))
