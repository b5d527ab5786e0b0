"""`kv_cache_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import nbformat
import pytest

NOTEBOOK = "kv_cache_lab.ipynb"
GROUPS = {"q_group_size": 32, "residual_length": 32}
DEFAULT = {"seq_len": 4096, "num_key_value_heads": 3, "bits": 16, "model": "smollm2-135m"} | GROUPS
SETUP = """\
from labkit.hardware import set_threads
from labkit.labs import kv_cache_lab
set_threads()"""
DRAWN_MS = 30_000
LAYERS, HEAD_DIM = 30, 64


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    cells = [nbformat.v4.new_code_cell(SETUP), nbformat.v4.new_code_cell("kv_cache_lab()", metadata={"tags": ["lab"]})]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1500)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def move(notebook, slider: str, steps: int, **changed: object) -> dict[str, object]:
    """Move a slider by keyboard and wait for the setting; returns the ledger's lines of it, by name."""
    before, setting = len(notebook.server.ledger.read()), DEFAULT | changed
    notebook.move(slider, steps)
    wanted = "kv_cache_lab.cache_bytes"
    notebook.wait_for_ledger(lambda line: line.name == wanted and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("kv_cache_lab."): line for line in lines}


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


def full(tokens: int, heads: int) -> int:
    """Bytes in 16 bits."""
    return LAYERS * 2 * heads * HEAD_DIM * tokens * 2


def rounded(tokens: int, recent: int, heads: int, bits: int) -> int:
    """Bytes with a bit more a value for its share of a scale and a minimum, and a counter a layer."""
    values = 2 * heads * HEAD_DIM
    return LAYERS * (values * (tokens - recent) * (bits + 1) // 8 + values * recent * 2 + 4)


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    own = full(4096, 3)
    assert notebook.number("cache_bytes") == (own, "94.4 MB") and notebook.number("predicted_bytes")[0] == own

    notebook.page.locator(".labkit-prediction .widget-toggle-button", has_text="12x").click()
    # Three KV heads to one: a third.
    lines = move(notebook, "KV heads", 1, num_key_value_heads=1)
    assert notebook.number("cache_bytes") == (own / 3, "31.5 MB")
    assert lines["cache_bytes"].value == own / 3 and lines["cache_bytes"].label == "MEASURED"
    assert lines["attention_s"].value > lines["floor_s"].value / 2 > 0 and "perplexity" not in lines

    # 16 bits to 4 in groups of 32: 5/16, but for the 64 tokens that are recent and a counter in each layer.
    small = rounded(4096, 64, 1, 4)
    assert small == own / 3 * 5 / 16 + LAYERS * (2 * HEAD_DIM * 64 * 11 / 8 + 4)
    notebook.move("Bits", 1)  # the setting in between gives way to the next
    lines = move(notebook, "Bits", 1, num_key_value_heads=1, bits=4)
    assert notebook.number("cache_bytes") == (small, "10.2 MB") and notebook.number("predicted_bytes")[0] == small
    assert lines["cache_bytes"].value == lines["predicted_bytes"].value == small
    assert notebook.number("smaller") == (pytest.approx(own / small), "9.28x")
    wait_drawn(notebook, "bytes", [4096])
    notebook.page.locator(".labkit-prediction", has_text="Your guess: 12x. Measured: 9.28x").wait_for(timeout=10_000)

    lines = move(notebook, "Tokens", 1, num_key_value_heads=1, bits=4, seq_len=8192)
    assert notebook.number("cache_bytes")[0] == rounded(8192, 64, 1, 4)
    assert notebook.number("cache_bytes")[0] - small == LAYERS * 2 * HEAD_DIM * 4096 * 5 / 8
    wait_drawn(notebook, "bytes", [8192])
    wait_drawn(notebook, "earlier bytes", [4096, 4096, 4096])

    lines = move(notebook, "KV heads", -1, num_key_value_heads=3, bits=4, seq_len=8192)
    assert lines["perplexity"].value == pytest.approx(lines["full_perplexity"].value, rel=0.05)
    assert lines["perplexity"].shapes == {"tokens": [511, 511]}
    wait_drawn(notebook, "perplexity", [16 / 5])
    notebook.page.mouse.move(0, 0)
    notebook.page.locator(".labkit-lab").screenshot(path=artifacts / "kv_cache_lab.png")
