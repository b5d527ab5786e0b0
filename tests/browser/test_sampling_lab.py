"""`sampling_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the ledger."""

import nbformat
import pytest

from tests.browser.titles import wrong_titles

NOTEBOOK = "sampling_lab.ipynb"
DEFAULT = {
    "temperature": 0.8,
    "top_k": 0,
    "top_p": 0.9,
    "prompt": 0,
    "seed": 0,
    "weights": "int4",
    "proposer": "EAGLE head",
    "max_new_tokens": 40,
    "model": "smollm2-135m",
}
SETUP = """\
from labkit.hardware import set_threads
from labkit.labs import sampling_lab
set_threads()"""
DRAWN_MS = 10_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    lab = nbformat.v4.new_code_cell("sampling_lab(device='cpu')", metadata={"tags": ["lab"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(SETUP), lab]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1700)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def measured(notebook, before: int, **changed: object) -> dict[str, object]:
    """Wait for this setting; returns the ledger's lines of it past the first `before`, by name."""
    setting, last = DEFAULT | changed, "sampling_lab.tokens_per_target_call"
    notebook.wait_for_ledger(lambda line: line.name == last and line.params == setting, before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params == setting]
    return {line.name.removeprefix("sampling_lab."): line for line in lines}


def move(notebook, slider: str, steps: int, **changed: object) -> dict[str, object]:
    """Move a slider by keyboard and wait for the setting."""
    before = len(notebook.server.ledger.read())
    notebook.move(slider, steps)
    return measured(notebook, before, **changed)


def choose(notebook, description: str, option: str | int, **changed: object) -> dict[str, object]:
    """Choose from a list, by name or by place, and wait for the setting."""
    before = len(notebook.server.ledger.read())
    which = {"index": option} if isinstance(option, int) else {"label": option}
    notebook.page.locator(".labkit-lab").get_by_label(description, exact=True).select_option(**which)
    return measured(notebook, before, **changed)


def texts(notebook) -> list[str]:
    """What the three columns hold."""
    return [text.partition("tokens")[2] for text in notebook.page.locator(".labkit-text").all_inner_texts()]


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
    warm, first = notebook.number("kept")[0], texts(notebook)
    assert 1 < warm < 1000 and notebook.number("mass_cut")[0] <= 0.1
    page.locator(".labkit-prediction .widget-toggle-button", has_text="it stays").click()

    # Temperature 0: one token can be drawn, and the three texts are one.
    lines = move(notebook, "Temperature", -4, temperature=0.0)
    assert notebook.number("kept") == (1.0, "1") and notebook.number("entropy_bits")[0] == 0.0
    assert lines["different_texts"].value == notebook.number("different_texts")[0] == 1.0
    assert lines["acceptance_rate"].value == lines["expected_acceptance"].value
    assert lines["acceptance_rate"].label == "MEASURED" and lines["expected_acceptance"].label == "MODELLED"
    greedy, accepted = texts(notebook), notebook.number("acceptance_rate")[0]
    assert len(set(greedy)) == 1 and page.locator(".labkit-text .labkit-unlikely").count() == 0

    # Hotter than the default: more may come, and the texts differ.
    lines = move(notebook, "Temperature", 6, temperature=1.2)
    assert notebook.number("kept")[0] > warm and lines["different_texts"].value == 3.0
    assert page.locator(".labkit-text .labkit-unlikely").count() > 0
    page.locator(".labkit-prediction", has_text="Your guess: it stays. Measured:").wait_for(timeout=DRAWN_MS)

    # The same temperature with one token kept: greedy's text again.
    lines = move(notebook, "top_k", 1, temperature=1.2, top_k=1)
    assert notebook.number("kept") == (1.0, "1") and texts(notebook) == greedy
    # A draft's 16-bit logits may tie, which greedy decoding settles and a draw does not.
    assert lines["acceptance_rate"].value == pytest.approx(accepted, abs=0.05)

    lines = move(notebook, "top_k", 3, temperature=1.2, top_k=10)
    assert 1 < lines["kept"].value <= 10 and lines["entropy"].value > 0

    # A smaller top_p never keeps more.
    kept = lines["kept"].value
    lines = move(notebook, "top_p", -3, temperature=1.2, top_k=10, top_p=0.5)
    assert lines["kept"].value <= kept
    wait_drawn(notebook, "now", [1.2])
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "sampling_lab.png")
    assert wrong_titles(notebook) == []
    page.locator(".labkit-lab").screenshot(path=artifacts / "sampling_lab_narrow.png")

    # The default again, measured a second time: the same seeds draw the same texts.
    page.get_by_role("button", name="Reset", exact=True).click()
    measured(notebook, len(notebook.server.ledger.read()))
    assert texts(notebook) == first and notebook.number("kept")[0] == warm


def test_prompt_seed_draft_and_weights_are_those_that_are_chosen(notebook):
    first = texts(notebook)
    choose(notebook, "First seed", "1", seed=1)
    assert texts(notebook)[:2] == first[1:], "the second text is the first"
    lines = choose(notebook, "Drafts", "its own int4 copy", seed=1, proposer="int4 copy")
    assert lines["acceptance_rate"].value > 0.9, "the same weights draft for themselves"
    lines = choose(notebook, "Weights", "float32", seed=1, proposer="int4 copy", weights="float32")
    assert lines["kept"].dtype == "float32"
    lines = choose(notebook, "Prompt", 1, seed=1, proposer="int4 copy", weights="float32", prompt=1)
    assert "birthday" in notebook.page.locator(".labkit-asked").inner_text()
