"""`paging_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import dataclasses

import nbformat
import pytest

from labkit.kv_cache.trace import load_trace, summarize

NOTEBOOK = "paging_lab.ipynb"
SLOTS = 65_536
DEFAULT = {"block_size": 16, "max_new": 8192, "shared_prefix": 0}
FIXED = {"max_length": 8192, "slots": SLOTS, "tokens_per_second": 20.0}
SETUP = "from labkit.labs import paging_lab"
LAB = "paging_lab()"
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


def move(notebook, slider: str, steps: int, **changed: int) -> dict[str, object]:
    """Move a slider by keyboard and wait for the setting; returns the ledger's lines of it, by name."""
    before, setting = len(notebook.server.ledger.read()), DEFAULT | FIXED | changed
    notebook.move(slider, steps)
    last = "paging_lab.reserved_finished_s"
    notebook.wait_for_ledger(lambda line: line.name == last and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("paging_lab."): line for line in lines}


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


def reserved(max_new: int) -> float:
    """What the replay in reserved memory leaves empty."""
    options = {"policy": "max_new", "block_size": 1, "num_blocks": SLOTS, "max_length": 8192}
    return summarize(load_trace(), max_new=max_new, **options).waste


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    page = notebook.page
    waste, text = notebook.number("waste")
    assert 0 < waste < 0.04 and text == f"{100 * waste:.2g}%"
    assert notebook.number("reserved_peak") == (SLOTS // 8192, "8")
    entries = notebook.number("table_entries")[0]

    page.locator(".labkit-prediction .widget-toggle-button", has_text="about 12%").click()
    lines = move(notebook, "Block size", 4, block_size=256)
    assert notebook.number("waste")[0] == lines["waste"].value > 0.04
    assert notebook.number("table_entries")[0] < entries / 8
    answer = f"Your guess: about 12%. Measured: {notebook.number('waste')[1]}; blocks of 16: {text}"
    page.locator(".labkit-prediction", has_text=answer).wait_for(timeout=DRAWN_MS)

    lines = move(notebook, "Block size", -6, block_size=1)
    assert notebook.number("waste") == (0.0, "0%")
    assert lines["waste"].value == 0 and lines["waste"].label == "MEASURED"
    wait_drawn(notebook, "paged by size", "x", [1])

    notebook.move("Block size", 2)  # back; the setting in between gives way to the next
    move(notebook, "Reserved", -3, max_new=1024)
    assert notebook.number("reserved_waste")[0] == pytest.approx(reserved(1024))
    lines = move(notebook, "Reserved", 1, max_new=2048)
    assert notebook.number("reserved_waste")[0] == lines["reserved_waste"].value == pytest.approx(reserved(2048))
    assert notebook.number("waste") == (waste, text)

    lines = move(notebook, "System prompt", 1, max_new=2048, shared_prefix=256)
    asked = [dataclasses.replace(r, prompt_tokens=r.prompt_tokens + 256) for r in load_trace()]
    assert lines["waste"].value == pytest.approx(summarize(asked, shared_prefix=256).waste)
    assert lines["table_entries"].value > entries + 16 * 20, "16 blocks more in each of some 26 tables"
    wait_drawn(notebook, "paged by size", "x", [16])
    page.wait_for_function(
        "() => document.querySelector('.labkit-lab .js-plotly-plot').data"
        ".find(trace => trace.name === 'sequences').text.filter(text => text.startsWith('<b>x')).length === 256 / 16",
        timeout=DRAWN_MS,
    )
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "paging_lab.png")
