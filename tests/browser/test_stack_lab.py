"""`stack_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the ledger."""

import nbformat
import pytest

from tests.browser.titles import wrong_titles

NOTEBOOK = "stack_lab.ipynb"
ALL = ["step", "bfloat16", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation"]
START = ["step", "bfloat16", "int4"]
DEFAULT = {"rungs": START, "left_out": [], "prompt": "chat", "num_assistant_tokens": 0, "model": "smollm2-135m"}
SETUP = """\
from labkit.hardware import set_threads
from labkit.labs import stack_lab
set_threads()"""
DRAWN_MS = 10_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    lab = nbformat.v4.new_code_cell("stack_lab(device='cpu')", metadata={"tags": ["lab"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(SETUP), lab]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1500)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def measured(notebook, before: int, **changed: object) -> dict[str, object]:
    """Wait for this setting; returns the ledger's lines of it past the first `before`, by name."""
    setting, last = DEFAULT | changed, "stack_lab.stack_s"
    notebook.wait_for_ledger(lambda line: line.name == last and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("stack_lab."): line for line in lines}


def press(notebook, *titles: str, **changed: object) -> dict[str, object]:
    """Press buttons of the row of rungs and wait for the setting."""
    before = len(notebook.server.ledger.read())
    for title in titles:
        notebook.page.locator(".labkit-rungs .jupyter-button", has_text=title).click()
    return measured(notebook, before, **changed)


def drawn_rows(notebook, name: str, count: int) -> None:
    """Wait until a trace of the figure on the page holds so many points; its data come after the lab's own words."""
    notebook.page.wait_for_function(
        """([name, count]) => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            return plot?.data?.find(trace => trace.name === name)?.x?.length === count
                && plot._fullLayout.width > 0.9 * plot.closest('.labkit-lab').clientWidth;
        }""",
        arg=[name, count],
        timeout=DRAWN_MS,
    )


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    page = notebook.page
    four, read = notebook.number("weight_bytes")[0], notebook.number("step_bytes")[0]
    assert notebook.number("popular") == (3.0, "3x") and notebook.number("kv_bytes")[0] == 23_040
    page.locator(".labkit-prediction .widget-toggle-button", has_text="2x to 4x").click()

    # Off with the INT4 matrices: half of float32's bytes are left, and the popular ladder has no such rung.
    lines = press(notebook, "INT4 weights", rungs=["step", "bfloat16"])
    half = notebook.number("weight_bytes")[0]
    assert half > four and lines["weight_bytes"].value == half == 269_030_016
    assert lines["speedup"].label == "MEASURED"
    drawn_rows(notebook, "speed", 3)

    lines = press(notebook, "INT8 weights", rungs=["step", "bfloat16", "int8"])
    eight = lines["weight_bytes"].value
    assert four < eight < half and notebook.number("popular")[0] == 1.8
    assert lines["ceiling"].label == "MODELLED"

    # Everything: the cache at (8 + 1)/16 of bfloat16's, more than a token a call; and a head that is read in fewer
    # bytes, but lies beside the embedding whose matrix it shared.
    lines = press(notebook, "all", rungs=ALL, num_assistant_tokens=2)
    assert notebook.number("kv_bytes")[0] == 23_040 * 9 / 16
    assert lines["step_bytes"].value < read and lines["weight_bytes"].value > four
    assert 1 < lines["tokens_per_call"].value <= 3 and notebook.number("popular") == (8.0, "8x")
    page.locator(".labkit-prediction", has_text="Your guess: 2x to 4x. Measured:").wait_for(timeout=DRAWN_MS)

    before = len(notebook.server.ledger.read())
    notebook.move("Draft length γ", -1)
    lines = measured(notebook, before, rungs=ALL, num_assistant_tokens=1)
    assert 1 <= lines["tokens_per_call"].value <= 2
    drawn_rows(notebook, "speed", 6)
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "stack_lab.png")
    assert wrong_titles(notebook) == []
    page.locator(".labkit-lab").screenshot(path=artifacts / "stack_lab_narrow.png")

    # Without the step that verifies drafts, speculation is left out and says why; nothing fails.
    rest = [rung for rung in ALL if rung not in ("step", "speculation")]
    press(notebook, "own step", rungs=rest, left_out=["speculation"])
    reason = page.locator('.labkit-rungs [data-rung="speculation"]')
    assert "verified by this package's own step" in reason.inner_text()

    # The baseline alone, after the long prompt: as many bytes, and about 512 tokens read.
    press(notebook, "none", rungs=[])
    before = len(notebook.server.ledger.read())
    page.locator(".labkit-lab .widget-dropdown", has_text="After").locator("select").select_option("a long prompt")
    lines = measured(notebook, before, rungs=[], prompt="long")
    assert 480 <= lines["speedup"].shapes["input_ids"][1] <= 544
    assert notebook.number("weight_bytes")[0] == 2 * half and notebook.number("popular")[0] == 1.0
