"""`quantization_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import nbformat
import pytest

NOTEBOOK = "quantization_lab.ipynb"
DEFAULT = {"bits": 4, "group_size": 64, "method": "RTN", "model": "smollm2-135m", "corpus": "your text"}
# One window of a text of its own, so that a perplexity takes a second and not ten.
SETUP = """\
from labkit.corpora import load_text
from labkit.hardware import set_threads
from labkit.labs import quantization_lab
set_threads()"""
LAB = "quantization_lab(text=load_text()[:2400])"
DRAWN_MS = 30_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    cells = [nbformat.v4.new_code_cell(SETUP), nbformat.v4.new_code_cell(LAB, metadata={"tags": ["lab"]})]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1500)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def wait_for(notebook, setting: dict[str, object], before: int) -> None:
    """Wait until a setting's ledger line is there and the lab says that it has measured."""
    wanted = "quantization_lab.bits_per_weight"
    notebook.wait_for_ledger(lambda line: line.name == wanted and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []


def move(notebook, slider: str, steps: int, **changed: object) -> dict[str, object]:
    """Move a slider by keyboard and wait for the setting; returns the ledger's lines of it, by name."""
    before = len(notebook.server.ledger.read())
    notebook.move(slider, steps)
    wait_for(notebook, DEFAULT | changed, before)
    lines = notebook.server.ledger.read()[before:]
    return {line.name.removeprefix("quantization_lab."): line for line in lines}


def wait_drawn(notebook, name: str, axis: str, values: list) -> None:
    """Wait until a trace of the figure on the page holds these values; its data come after the lab's own words."""
    notebook.page.wait_for_function(
        """([name, axis, values]) => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            const held = plot?.data?.find(trace => trace.name === name)?.[axis];
            return JSON.stringify(held && Array.from(held)) === JSON.stringify(values)
                && plot._fullLayout.width > 0.9 * plot.closest('.labkit-lab').clientWidth;
        }""",
        arg=[name, axis, values],
        timeout=DRAWN_MS,
    )


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    assert notebook.number("bits_per_weight") == (4.375, "4.375")
    # 30 layers of 576 x (576 + 192 + 192 + 576) and three matrices of 576 x 1536.
    weights = 30 * (576 * 1536 + 3 * 576 * 1536)
    assert notebook.number("code_bytes") == (weights * 4 / 8, "53.1 MB")
    whole = notebook.number("model_bytes")[0]

    lines = move(notebook, "Bits", 1, bits=8)
    assert notebook.number("bits_per_weight") == (8.375, "8.375")
    assert notebook.number("code_bytes") == (weights, "106 MB")
    assert notebook.number("model_bytes")[0] == whole + weights * 4 / 8
    assert lines["code_bytes"].value == weights and lines["perplexity"].label == "MEASURED"
    wait_drawn(notebook, "perplexity", "x", [8.375])
    wait_drawn(notebook, "earlier perplexity", "x", [4.375])

    notebook.move("Bits", -1)  # the setting in between gives way to the next
    move(notebook, "Group", -1, group_size=32)
    assert notebook.number("bits_per_weight") == (4.75, "4.75")
    assert notebook.number("code_bytes")[0] == weights * 4 / 8

    lines = move(notebook, "Method", 2, group_size=32, method="GPTQ")
    assert lines["block_error_ratio"].params == DEFAULT | {
        "group_size": 32,
        "method": "GPTQ",
        "layer": 15,
        "calibration_tokens": 2048,
    }
    assert 0 < lines["block_error_ratio"].value < 1
    assert notebook.number("perplexity")[1] == "not recorded"
    # The columns' order: 32 bits for each input of each matrix.
    inputs = 30 * (6 * 576 + 1536)
    assert notebook.number("bits_per_weight")[0] == pytest.approx(4.75 + 32 * inputs / weights)
    wait_drawn(
        notebook, "error in detail", "x", ["RTN, median<br>of all layers", "RTN,<br>layer 15", "GPTQ,<br>layer 15"]
    )
    notebook.page.mouse.move(0, 0)
    notebook.page.locator(".labkit-lab").screenshot(path=artifacts / "quantization_lab.png")
