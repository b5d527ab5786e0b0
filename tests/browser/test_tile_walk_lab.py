"""`tile_walk_lab` as a learner moves it: each knob changes a quantity that is known beforehand, and Play walks."""

import nbformat
import pytest

from tests.browser.titles import wrong_titles

NOTEBOOK = "tile_walk_lab.ipynb"
FIXED = {"length": 32, "head_dim": 16}
SETUP = "from labkit.labs import tile_walk_lab"
# The button once more, outside the lab: as in a page that shows a lab twice.
LAB = "lab = tile_walk_lab()\ndisplay(lab.spec.knobs['step'].play)\nlab"
DRAWN_MS = 30_000
PLAYED_MS = 30_000


@pytest.fixture(scope="module")
def notebook(server, open_for_module):
    cells = [nbformat.v4.new_code_cell(SETUP), nbformat.v4.new_code_cell(LAB, metadata={"tags": ["lab"]})]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), server.root / NOTEBOOK)
    notebook = open_for_module(NOTEBOOK, height=1500)
    notebook.run_labs()
    assert notebook.errors() == []
    return notebook


def asked(line, setting: dict[str, object]) -> bool:
    return line.name == "tile_walk_lab.tiles_visited" and line.params.items() >= (FIXED | setting).items()


def after(notebook, act, **setting: object) -> dict[str, object]:
    """Do something and wait for that setting; returns the ledger's lines of it, by name."""
    before = len(notebook.server.ledger.read())
    act()
    notebook.wait_for_ledger(lambda line: asked(line, setting), before)
    notebook.wait_measured()
    assert notebook.errors() == []
    lines = [line for line in notebook.server.ledger.read()[before:] if line.params.items() >= setting.items()]
    return {line.name.removeprefix("tile_walk_lab."): line for line in lines}


def wait_drawn(notebook, name: str, count: int) -> None:
    """Wait until a trace of the figure on the page holds as many points."""
    notebook.page.wait_for_function(
        """([name, count]) => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            return plot?.data?.find(trace => trace.name === name)?.x?.length === count
                && plot._fullLayout.width > 0.9 * plot.closest('.labkit-lab').clientWidth;
        }""",
        arg=[name, count],
        timeout=DRAWN_MS,
    )


def wait_number(notebook, key: str, text: str) -> None:
    notebook.page.locator(f'.labkit-lab [data-key="{key}"]', has_text=text).wait_for(timeout=DRAWN_MS)


def test_each_knob_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    page = notebook.page
    assert notebook.number("tiles") == (10, "10") and notebook.number("tile")[1] == "(3, 1)"
    block = 8 * 16 * 4
    assert notebook.number("read_bytes")[0] == block * (4 + 2 * 8)

    lines = after(notebook, lambda: notebook.move("Tile", 1), block_size=8, causal=True, step=9)
    wait_number(notebook, "tile", "(3, 2)")
    assert lines["read_bytes"].value == notebook.number("read_bytes")[0] == block * (4 + 2 * 9)
    lines = after(notebook, lambda: notebook.move("Tile", 1), block_size=8, causal=True, step=10)
    wait_number(notebook, "rows_done", "32 of 32")
    assert notebook.number("largest_error")[0] == lines["largest_error"].value < 1e-6
    assert lines["largest_error"].label == "MEASURED" and lines["moved_bytes"].label == "MODELLED"
    wait_drawn(notebook, "error", 4)

    page.locator(".labkit-prediction .widget-toggle-button", has_text="about 2").click()
    mask = page.locator(".labkit-lab .widget-checkbox input")
    lines = after(notebook, mask.click, block_size=8, causal=False, step=16)
    wait_number(notebook, "tiles", "16")
    assert lines["moved_bytes"].value < lines["standard_bytes"].value
    wait_drawn(notebook, "skipped", 0)
    lines = after(notebook, lambda: notebook.move("Block size", -1), block_size=4, causal=False, step=64)
    wait_number(notebook, "tiles", "64")
    assert lines["moved_bytes"].value > lines["standard_bytes"].value
    page.locator(".labkit-prediction", has_text="Your guess: about 2. Measured: 1.7 on average").wait_for()

    after(notebook, mask.click, block_size=4, causal=True, step=36)
    lines = after(notebook, lambda: notebook.move("Block size", 1), block_size=8, causal=True, step=10)
    wait_drawn(notebook, "skipped", 6)
    after(notebook, lambda: notebook.move("Tile", -2), block_size=8, causal=True, step=8)
    wait_drawn(notebook, "visited", 8 * 6)
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "tile_walk_lab.png")


def stands_at(notebook) -> str:
    handle = notebook.slider("Tile")
    return f"{handle.get_attribute('aria-valuenow')} of {handle.get_attribute('aria-valuemax')}"


def test_reset_goes_back_to_the_first_step_and_the_end_key_to_the_last(notebook):
    page = notebook.page
    mask = page.locator(".labkit-lab .widget-checkbox input")
    reset = page.locator(".labkit-lab button", has_text="Reset")
    for attempt in range(4):
        after(notebook, lambda: notebook.move("Block size", -1), block_size=4, causal=True)
        if attempt % 2:
            after(notebook, mask.click, block_size=4, causal=False)
        end = (64 if attempt % 2 else 36) * 1.0
        setting = {"block_size": 4, "step": int(end)}
        after(notebook, lambda: notebook.slider("Tile").press("End"), **setting)
        assert stands_at(notebook) == f"{end} of {end}"
        after(notebook, reset.click, block_size=8, causal=True, step=8)
        # Longer than anything on its way to and from the kernel takes.
        page.wait_for_timeout(1500)
        assert stands_at(notebook) == "8.0 of 10.0", attempt
        wait_number(notebook, "tile", "(3, 1)")
        assert notebook.errors() == []
    after(notebook, lambda: notebook.slider("Tile").press("End"), block_size=8, step=10)


def test_reset_stops_the_play(notebook):
    page = notebook.page
    before = len(notebook.server.ledger.read())
    page.locator(".labkit-lab .labkit-play").click()
    notebook.wait_for_ledger(lambda line: asked(line, {}) and 1 <= line.params["step"] < 7, before)
    after(notebook, page.locator(".labkit-lab button", has_text="Reset").click, block_size=8, causal=True, step=8)
    page.locator(".labkit-lab .labkit-play", has_text="Play").wait_for(timeout=DRAWN_MS)
    page.wait_for_timeout(1500)
    assert stands_at(notebook) == "8.0 of 10.0"


def test_play_walks_to_the_end_and_starts_again_from_there(notebook):
    page = notebook.page
    play = page.locator(".labkit-lab .labkit-play")
    play.scroll_into_view_if_needed()
    before = len(notebook.server.ledger.read())
    play.click()
    notebook.wait_for_ledger(lambda line: asked(line, {"step": 10}), before)
    wait_number(notebook, "rows_done", "32 of 32")
    page.locator(".labkit-lab .labkit-play", has_text="Play").wait_for(timeout=PLAYED_MS)  # it has stopped by itself

    before = len(notebook.server.ledger.read())
    play.click()
    page.locator(".labkit-lab .labkit-play", has_text="Pause").wait_for(timeout=DRAWN_MS)
    notebook.wait_for_ledger(lambda line: asked(line, {"step": 10}), before)
    seen = [line for line in notebook.server.ledger.read()[before:] if asked(line, {"block_size": 8, "causal": True})]
    steps = [line.params["step"] for line in seen]
    # A machine that is busy with something else may pass over a step: the latest wins.
    assert steps == sorted(set(steps)) and steps[0] <= 3 and len(steps) >= 4, f"from the begin on: {steps}"
    assert [line.value for line in seen] == steps
    notebook.wait_measured()
    assert notebook.errors() == []


def test_play_can_be_paused(notebook):
    page = notebook.page
    play = page.locator(".labkit-lab .labkit-play")
    before = len(notebook.server.ledger.read())
    play.click()
    notebook.wait_for_ledger(lambda line: asked(line, {}) and 1 <= line.params["step"] < 9, before)
    play.click()
    page.locator(".labkit-lab .labkit-play", has_text="Play").wait_for(timeout=DRAWN_MS)
    page.wait_for_timeout(1500)
    stood = notebook.slider("Tile").get_attribute("aria-valuenow")
    page.wait_for_timeout(1500)
    assert notebook.slider("Tile").get_attribute("aria-valuenow") == stood and float(stood) < 10
    assert notebook.errors() == []


def test_titles_fit_in_a_narrow_window(notebook, artifacts):
    after(notebook, lambda: notebook.move("Block size", -1), block_size=4)
    after(notebook, lambda: notebook.slider("Tile").press("End"), block_size=4, step=36)
    after(notebook, lambda: notebook.move("Block size", 1), block_size=8)
    after(notebook, lambda: notebook.move("Block size", 1), block_size=16)
    assert wrong_titles(notebook) == []
    notebook.page.mouse.move(0, 0)
    notebook.page.locator(".labkit-lab").screenshot(path=artifacts / "tile_walk_lab_narrow.png")
