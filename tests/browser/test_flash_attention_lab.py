"""`flash_attention_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the
ledger."""

import nbformat
import pytest

from tests.browser.titles import wrong_titles

NOTEBOOK = "flash_attention_lab.ipynb"
HEADS, SHARED = 3, 1
FIXED = {"num_attention_heads": HEADS, "num_key_value_heads": SHARED, "dtype": "float32", "kernel": "tiled"}
DEFAULT = {"seq_len": 2048, "head_dim": 64, "block_size": 128, "causal": True} | FIXED
SETUP = """\
from labkit.hardware import set_threads
from labkit.labs import flash_attention_lab
set_threads()"""
DRAWN_MS = 30_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    lab = nbformat.v4.new_code_cell("flash_attention_lab(device='cpu')", metadata={"tags": ["lab"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(SETUP), lab]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1500)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def measured(notebook, before: int, **changed: object) -> dict[str, object]:
    """Wait for this setting; returns the ledger's lines of it past the first `before`, by name."""
    setting, last = DEFAULT | changed, "flash_attention_lab.difference"
    notebook.wait_for_ledger(lambda line: line.name == last and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("flash_attention_lab."): line for line in lines}


def move(notebook, slider: str, steps: int, **changed: object) -> dict[str, object]:
    """Move a slider by keyboard and wait for the setting."""
    before = len(notebook.server.ledger.read())
    notebook.move(slider, steps)
    return measured(notebook, before, **changed)


def wait_drawn(notebook, name: str, values: list) -> None:
    """Wait until a trace of the figure on the page holds these x; its data come after the lab's own words."""
    notebook.page.wait_for_function(
        """([name, values]) => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            const held = plot?.data?.find(trace => trace.name === name)?.x;
            return JSON.stringify(held && Array.from(held)) === JSON.stringify(values)
                && plot._fullLayout.width > 0.9 * plot.closest('.labkit-lab').clientWidth;
        }""",
        arg=[name, values],
        timeout=DRAWN_MS,
    )


def matrix(tokens: int) -> int:
    """Bytes of one matrix of scores."""
    return HEADS * tokens**2 * 4


def output(tokens: int, head_dim: int = 64) -> int:
    return HEADS * tokens * head_dim * 4


def keys(tokens: int, block: int, head_dim: int = 64) -> int:
    """Bytes of K and V that causal tiles read: the first block of queries one block of keys, the second two."""
    blocks = tokens // block
    return HEADS * 2 * head_dim * 4 * block * blocks * (blocks + 1) // 2


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    page = notebook.page
    # Scores and weights of every head, an output and a mask; the allocator counts them.
    peak = notebook.number("standard_peak")[0]
    assert 2 * matrix(2048) < peak < 2.6 * matrix(2048)
    assert notebook.number("own_moved")[0] == keys(2048, 128) + 2 * output(2048) + HEADS * 2048 * 4
    wait_drawn(notebook, "native curve time", [128, 256, 512, 1024, 2048])
    page.locator(".labkit-prediction .widget-toggle-button", has_text="4x and 4x").click()

    # Half the block: K and V are read about twice as often, and the output is the same.
    lines = move(notebook, "Block size", -1, block_size=64)
    assert notebook.number("own_moved")[0] == keys(2048, 64) + 2 * output(2048) + HEADS * 2048 * 4
    assert lines["own_moved"].label == "MODELLED" and lines["own_s"].backend == "labkit tiled"
    assert lines["difference"].value == notebook.number("own_difference")[0] < 1e-5

    # Heads of half the size: half the FLOPs, half the output, the same matrix.
    flops = notebook.number("standard_flops")[0]
    lines = move(notebook, "Head size", -1, block_size=64, head_dim=32)
    assert notebook.number("standard_flops")[0] == flops / 2
    assert lines["standard_formula"].value == output(2048, 32) + 2 * matrix(2048)

    # Half the length: a quarter of the matrix, by the allocator too.
    lines = move(notebook, "Tokens", -1, block_size=64, head_dim=32, seq_len=1024)
    assert lines["standard_peak"].label == "MEASURED" and lines["standard_peak"].value >= 2 * matrix(1024)
    assert peak / notebook.number("standard_peak")[0] == pytest.approx(4, rel=0.1)
    assert lines["native_formula"].value == lines["own_formula"].value == output(1024, 32) + HEADS * 1024 * 4
    assert lines["native_peak"].value < peak / 20
    wait_drawn(notebook, "standard memory", [1024])

    # Not causal: every pair is needed, and every tile is visited.
    before = len(notebook.server.ledger.read())
    page.locator(".labkit-lab .widget-checkbox input").click()
    lines = measured(notebook, before, block_size=64, head_dim=32, seq_len=1024, causal=False)
    assert lines["native_flops"].value == lines["own_flops"].value == 4 * HEADS * 1024**2 * 32
    assert lines["native_s"].value > lines["native_floor_s"].value > 0

    page.locator(".labkit-lab .widget-checkbox input").click()
    notebook.move("Head size", 1)
    notebook.move("Block size", 1)
    move(notebook, "Tokens", 2, seq_len=4096)
    grown = page.locator(".labkit-prediction", has_text="Your guess: 4x and 4x. Measured: from 2,048 to 4,096 tokens")
    grown.wait_for(timeout=DRAWN_MS)
    wait_drawn(notebook, "native time", [4096])
    assert notebook.number("native_speedup")[0] > 0 and notebook.number("own_difference")[0] < 1e-5
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "flash_attention_lab.png")
    assert wrong_titles(notebook) == []
    page.locator(".labkit-lab").screenshot(path=artifacts / "flash_attention_lab_narrow.png")
