"""`speculative_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the ledger."""

import nbformat
import pytest

from tests.browser.titles import wrong_titles

NOTEBOOK = "speculative_lab.ipynb"
DEFAULT = {
    "num_assistant_tokens": 3,
    "temperature": 0.0,
    "proposer": "EAGLE head",
    "prompt": "chat",
    "weights": "int4",
    "shape": "chain",
    "max_new_tokens": 64,
    "model": "smollm2-135m",
}
SETUP = """\
from labkit.hardware import set_threads
from labkit.labs import speculative_lab
set_threads()"""
DRAWN_MS = 30_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    lab = nbformat.v4.new_code_cell("speculative_lab(device='cpu')", metadata={"tags": ["lab"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(SETUP), lab]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1700)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def measured(notebook, before: int, **changed: object) -> dict[str, object]:
    """Wait for this setting; returns the ledger's lines of it past the first `before`, by name."""
    setting, last = DEFAULT | changed, "speculative_lab.speculative_s"
    notebook.wait_for_ledger(lambda line: line.name == last and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("speculative_lab."): line for line in lines}


def move(notebook, slider: str, steps: int, **changed: object) -> dict[str, object]:
    """Move a slider by keyboard and wait for the setting."""
    before = len(notebook.server.ledger.read())
    notebook.move(slider, steps)
    return measured(notebook, before, **changed)


def choose(notebook, description: str, option: str, **changed: object) -> dict[str, object]:
    """Choose from a list and wait for the setting."""
    before = len(notebook.server.ledger.read())
    row = notebook.page.locator(".labkit-lab .widget-dropdown", has_text=description)
    row.locator("select").select_option(option)
    return measured(notebook, before, **changed)


def count(notebook, kind: str) -> int:
    """Tokens of a kind in the text."""
    return notebook.page.locator(f".labkit-tokens .labkit-{kind}").count()


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


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    page = notebook.page
    assert notebook.number("drafted_per_call") == (3.0, "3")
    page.locator(".labkit-prediction .widget-toggle-button", has_text="3 to 5").click()

    lines = move(notebook, "Draft length", -1, num_assistant_tokens=2)
    assert notebook.number("drafted_per_call") == (2.0, "2") and lines["drafted_per_call"].value == 2.0
    made = notebook.number("tokens_per_target_call")[0]
    assert 1 < made <= 3 and lines["tokens_per_target_call"].value == made
    assert lines["modelled_speedup"].label == "MODELLED" and lines["speedup"].label == "MEASURED"
    wait_drawn(notebook, "earlier", [3])

    # Twice the draft: 4 a call, and no token more is kept of the first two.
    move(notebook, "Draft length", 2, num_assistant_tokens=4)
    assert notebook.number("drafted_per_call") == (4.0, "4")
    assert notebook.number("tokens_per_target_call")[0] >= made - 0.05
    kept, refused = count(notebook, "accepted"), count(notebook, "rejected")
    assert kept > 0 and refused > 0
    # The very last token has no room for a draft before it.
    assert count(notebook, "plain") <= 1
    calls = page.locator(".labkit-tokens .labkit-call").count()
    assert kept + count(notebook, "residual") + count(notebook, "bonus") + 1 in range(calls, 64 + 1)

    move(notebook, "Draft length", 3, num_assistant_tokens=7)
    page.locator(".labkit-prediction", has_text="Your guess: 3 to 5. Measured:").wait_for(timeout=DRAWN_MS)
    notebook.move("Draft length", -4)
    measured(notebook, 0, num_assistant_tokens=3)
    wait_drawn(notebook, "speed-up", [3])
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "speculative_lab.png")
    assert wrong_titles(notebook) == []
    page.locator(".labkit-lab").screenshot(path=artifacts / "speculative_lab_narrow.png")

    # Of a tree more is drafted than it is deep, and verified in one call.
    lines = choose(notebook, "Draft is", "a tree (EAGLE)", shape="tree")
    assert notebook.number("drafted_per_call")[0] == lines["drafted_per_call"].value == 6.0

    # The same weights draft for themselves: always right, and slower for it.
    choose(notebook, "Draft is", "a chain")
    move(notebook, "Proposer", 2, proposer="int4 copy")
    assert notebook.number("acceptance_rate")[0] > 0.9 and count(notebook, "bonus") > count(notebook, "residual")
    assert notebook.number("draft_cost")[0] > 0.5

    notebook.move("Draft length", -3)
    lines = measured(notebook, 0, proposer="int4 copy", num_assistant_tokens=0)
    assert notebook.number("tokens_per_target_call") == (1.0, "1.00") and lines["tokens_per_target_call"].value == 1.0
    assert count(notebook, "plain") == page.locator(".labkit-tokens .labkit-call").count() - 1 > 10

    notebook.move("Draft length", 3)
    move(notebook, "Proposer", -1, proposer="prompt lookup")
    lines = choose(notebook, "Prompt", "to copy from", proposer="prompt lookup", prompt="copy_heavy")
    assert lines["tokens_per_target_call"].value > 1.5

    hot = {"proposer": "prompt lookup", "prompt": "copy_heavy", "temperature": 1.5}
    cold = notebook.number("acceptance_rate")[0]
    move(notebook, "Temperature", 6, **hot)
    assert notebook.number("acceptance_rate")[0] < cold, "at random there is little to copy"

    lines = choose(notebook, "Target's weights", "float32", weights="float32", **hot)
    assert lines["plain_s"].dtype == "float32"
