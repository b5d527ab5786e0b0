"""`tile_walk_lab` as a learner moves it: each knob changes a quantity that is known beforehand, and Play walks."""

import pytest

from tests.browser.lab import DRAWN_MS
from tests.browser.titles import wrong_titles

DEFAULT = {"length": 32, "head_dim": 16}
# The button once more, outside the lab: as in a page that shows a lab twice.
LAB = "lab = labs.tile_walk_lab()\ndisplay(lab.spec.knobs['step'].play)\nlab"
PLAYED_MS = 30_000


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab(LAB, "tile_walk_lab", DEFAULT, "tiles_visited")


def wait_number(lab, key: str, text: str) -> None:
    lab.page.locator(f'.labkit-lab [data-key="{key}"]', has_text=text).wait_for(timeout=DRAWN_MS)


def test_each_knob_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    page = lab.page
    assert lab.number("tiles") == (10, "10") and lab.number("tile")[1] == "(3, 1)"
    block = 8 * 16 * 4
    assert lab.number("read_bytes")[0] == block * (4 + 2 * 8)

    lines = lab.move("Tile", 1, block_size=8, causal=True, step=9)
    wait_number(lab, "tile", "(3, 2)")
    assert lines["read_bytes"].value == lab.number("read_bytes")[0] == block * (4 + 2 * 9)
    lines = lab.move("Tile", 1, block_size=8, causal=True, step=10)
    wait_number(lab, "rows_done", "32 of 32")
    assert lab.number("largest_error")[0] == lines["largest_error"].value < 1e-6
    assert lines["largest_error"].label == "MEASURED" and lines["moved_bytes"].label == "MODELLED"
    lab.wait_drawn("error", 4)

    lab.guess("about 2")
    mask = page.locator(".labkit-lab .widget-checkbox input")
    lines = lab.after(mask.click, block_size=8, causal=False, step=16)
    wait_number(lab, "tiles", "16")
    assert lines["moved_bytes"].value < lines["standard_bytes"].value
    lab.wait_drawn("skipped", 0)
    lines = lab.move("Block size", -1, block_size=4, causal=False, step=64)
    wait_number(lab, "tiles", "64")
    assert lines["moved_bytes"].value > lines["standard_bytes"].value
    lab.wait_answer("Your guess: about 2. Measured: 1.7 on average")

    lab.after(mask.click, block_size=4, causal=True, step=36)
    lines = lab.move("Block size", 1, block_size=8, causal=True, step=10)
    lab.wait_drawn("skipped", 6)
    lab.move("Tile", -2, block_size=8, causal=True, step=8)
    lab.wait_drawn("visited", 8 * 6)
    lab.picture(artifacts / "tile_walk_lab.png")


def stands_at(lab) -> str:
    handle = lab.notebook.slider("Tile")
    return f"{handle.get_attribute('aria-valuenow')} of {handle.get_attribute('aria-valuemax')}"


def test_reset_goes_back_to_the_first_step_and_the_end_key_to_the_last(lab):
    page = lab.page
    mask = page.locator(".labkit-lab .widget-checkbox input")
    reset = lab.button("Reset")
    for attempt in range(4):
        lab.move("Block size", -1, block_size=4, causal=True)
        if attempt % 2:
            lab.after(mask.click, block_size=4, causal=False)
        end = (64 if attempt % 2 else 36) * 1.0
        setting = {"block_size": 4, "step": int(end)}
        lab.after(lambda: lab.notebook.slider("Tile").press("End"), **setting)
        assert stands_at(lab) == f"{end} of {end}"
        lab.after(reset.click, block_size=8, causal=True, step=8)
        # Longer than anything on its way to and from the kernel takes.
        page.wait_for_timeout(1500)
        assert stands_at(lab) == "8.0 of 10.0", attempt
        wait_number(lab, "tile", "(3, 1)")
        assert lab.notebook.errors() == []
    lab.after(lambda: lab.notebook.slider("Tile").press("End"), block_size=8, step=10)


def test_reset_stops_the_play(lab):
    page = lab.page
    before = len(lab.notebook.server.ledger.read())
    page.locator(".labkit-lab .labkit-play").click()
    lab.notebook.wait_for_ledger(lambda line: lab.is_last(line, {}) and 1 <= line.params["step"] < 7, before)
    lab.after(lab.button("Reset").click, block_size=8, causal=True, step=8)
    page.locator(".labkit-lab .labkit-play", has_text="Play").wait_for(timeout=DRAWN_MS)
    page.wait_for_timeout(1500)
    assert stands_at(lab) == "8.0 of 10.0"


def test_play_walks_to_the_end_and_starts_again_from_there(lab):
    page = lab.page
    play = page.locator(".labkit-lab .labkit-play")
    play.scroll_into_view_if_needed()
    before = len(lab.notebook.server.ledger.read())
    play.click()
    lab.notebook.wait_for_ledger(lambda line: lab.is_last(line, {"step": 10}), before)
    wait_number(lab, "rows_done", "32 of 32")
    page.locator(".labkit-lab .labkit-play", has_text="Play").wait_for(timeout=PLAYED_MS)  # it has stopped by itself

    before = len(lab.notebook.server.ledger.read())
    play.click()
    page.locator(".labkit-lab .labkit-play", has_text="Pause").wait_for(timeout=DRAWN_MS)
    lab.notebook.wait_for_ledger(lambda line: lab.is_last(line, {"step": 10}), before)
    seen = [
        line
        for line in lab.notebook.server.ledger.read()[before:]
        if lab.is_last(line, {"block_size": 8, "causal": True})
    ]
    steps = [line.params["step"] for line in seen]
    # A machine that is busy with something else may pass over a step: the latest wins.
    assert steps == sorted(set(steps)) and steps[0] <= 3 and len(steps) >= 4, f"from the begin on: {steps}"
    assert [line.value for line in seen] == steps
    lab.notebook.wait_measured()
    assert lab.notebook.errors() == []


def test_play_can_be_paused(lab):
    page = lab.page
    play = page.locator(".labkit-lab .labkit-play")
    before = len(lab.notebook.server.ledger.read())
    play.click()
    lab.notebook.wait_for_ledger(lambda line: lab.is_last(line, {}) and 1 <= line.params["step"] < 9, before)
    play.click()
    page.locator(".labkit-lab .labkit-play", has_text="Play").wait_for(timeout=DRAWN_MS)
    page.wait_for_timeout(1500)
    stood = lab.notebook.slider("Tile").get_attribute("aria-valuenow")
    page.wait_for_timeout(1500)
    assert lab.notebook.slider("Tile").get_attribute("aria-valuenow") == stood and float(stood) < 10
    assert lab.notebook.errors() == []


def test_titles_fit_in_a_narrow_window(lab, artifacts):
    lab.move("Block size", -1, block_size=4)
    lab.after(lambda: lab.notebook.slider("Tile").press("End"), block_size=4, step=36)
    lab.move("Block size", 1, block_size=8)
    lab.move("Block size", 1, block_size=16)
    assert wrong_titles(lab.notebook) == []
    lab.picture(artifacts / "tile_walk_lab_narrow.png")
