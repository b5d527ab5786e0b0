"""`eviction_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import nbformat
import pytest

NOTEBOOK = "eviction_lab.ipynb"
DEFAULT = {"method": "sinks", "budget": 0.25, "depth": 0.1, "model": "smollm2-135m"}
SETUP = """\
from labkit.hardware import set_threads
from labkit.labs import eviction_lab
set_threads()"""
# Keys and values of a token: 30 layers with 3 KV heads of 64 channels in float32.
TOKEN = 2 * 30 * 3 * 64 * 4
DRAWN_MS = 30_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    cells = [nbformat.v4.new_code_cell(SETUP), nbformat.v4.new_code_cell("eviction_lab()", metadata={"tags": ["lab"]})]
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
    notebook.wait_for_ledger(lambda line: line.name == "eviction_lab.perplexity" and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("eviction_lab."): line for line in lines}


def held(notebook) -> tuple[int, int]:
    """Tokens a KV head that the cache holds, of how many of the prompt."""
    now, _, seen = notebook.number("held")[1].split()
    return int(now), int(seen)


def wait_map(notebook, layer: int, row: list[int]) -> None:
    """Wait until a layer's row of the map on the page is this; it comes after the lab's own words."""
    notebook.page.wait_for_function(
        """([layer, row]) => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            const held = plot?.data?.find(trace => trace.name === 'kept')?.z?.[layer];
            return JSON.stringify(held && Array.from(held)) === JSON.stringify(row)
                && plot._fullLayout.width > 0.9 * plot.closest('.labkit-lab').clientWidth;
        }""",
        arg=[layer, row],
        timeout=DRAWN_MS,
    )


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    kept, seen = held(notebook)
    # The prompt's last token is still to come.
    assert kept == round(0.25 * (seen + 1)) and notebook.number("digits_kept") == (0, "0%")
    # The four sinks' keys once more, as they came in.
    assert notebook.number("cache_bytes")[0] == kept * TOKEN + 4 * TOKEN // 2
    wait_map(notebook, 29, [3] * 4 + [0] * (seen - kept) + [3] * (kept - 4))
    assert notebook.number("full_needles")[0] >= 9

    lines = move(notebook, "Budget", 1, budget=0.125)
    assert held(notebook) == (round(0.125 * (seen + 1)), seen)
    assert lines["cache_bytes"].value == held(notebook)[0] * TOKEN + 4 * TOKEN // 2
    assert lines["perplexity"].value > lines["full_perplexity"].value and lines["perplexity"].label == "MEASURED"

    notebook.move("Budget", -1)  # the setting in between gives way to the next
    lines = move(notebook, "Method", 2, method="snapkv")
    # An int32 a token and KV head says where it stood; the number is not all gone.
    assert lines["cache_bytes"].value == kept * (TOKEN + 30 * 3 * 4)
    assert notebook.number("digits_kept")[0] > 0
    assert lines["needles_found"].value >= 7 and lines["needles_found"].shapes == {"prompts": [10, 10]}
    notebook.page.mouse.move(0, 0)
    notebook.page.locator(".labkit-lab").screenshot(path=artifacts / "eviction_lab.png")

    lines = move(notebook, "Method", -3, method="window")
    assert lines["cache_bytes"].value == kept * TOKEN and lines["digits_kept"].value == 0
    assert lines["needles_found"].value <= 4
    wait_map(notebook, 0, [0] * (seen - kept) + [3] * kept)

    lines = move(notebook, "Depth", 4, method="window", depth=0.9)
    assert lines["digits_kept"].value == 1 and notebook.number("digits_kept") == (1, "100%")

    lines = move(notebook, "Method", -1, method="full", depth=0.9)
    kept, seen = held(notebook)
    assert kept == seen and lines["cache_bytes"].value == seen * TOKEN == lines["full_bytes"].value
    assert lines["needles_found"].value >= 9 and notebook.number("perplexity_ratio")[0] == 1
