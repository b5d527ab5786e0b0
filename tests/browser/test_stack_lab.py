"""`stack_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the ledger."""

import pytest

from labkit.measure import Measurement
from tests.browser.titles import wrong_titles

ALL = ["step", "bfloat16", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation"]
START = ["step", "bfloat16", "int4"]
DEFAULT = {"rungs": START, "left_out": [], "prompt": "chat", "num_assistant_tokens": 0, "model": "smollm2-135m"}


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab('labs.stack_lab(device="cpu")', "stack_lab", DEFAULT, "stack_s")


def press(lab, title: str, **changed: object) -> dict[str, Measurement]:
    """Press a button of the row of rungs and wait for the setting."""
    return lab.after(lab.page.locator(".labkit-rungs .jupyter-button", has_text=title).click, **changed)


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    four, read = lab.number("weight_bytes")[0], lab.number("step_bytes")[0]
    assert lab.number("popular") == (3.0, "3x") and lab.number("kv_bytes")[0] == 23_040
    lab.guess("2x to 4x")

    # Off with the INT4 matrices: half of float32's bytes are left, and the popular ladder has no such rung.
    lines = press(lab, "INT4 weights", rungs=["step", "bfloat16"])
    half = lab.number("weight_bytes")[0]
    assert half > four and lines["weight_bytes"].value == half == 269_030_016
    assert lines["speedup"].label == "MEASURED"
    lab.wait_drawn("speed", 3)

    lines = press(lab, "INT8 weights", rungs=["step", "bfloat16", "int8"])
    eight = lines["weight_bytes"].value
    assert four < eight < half and lab.number("popular")[0] == 1.8
    assert lines["ceiling"].label == "MODELLED"

    # Everything, one token drafted a call: the cache at (8 + 1)/16 of bfloat16's, more than a token a call; and a head
    # that is read in fewer bytes, but lies beside the embedding whose matrix it shared.
    lab.page.locator(".labkit-rungs .jupyter-button", has_text="all").click()
    lines = lab.move("Draft length γ", -1, rungs=ALL, num_assistant_tokens=1)
    assert lab.number("kv_bytes")[0] == 23_040 * 9 / 16
    assert lines["step_bytes"].value < read and lines["weight_bytes"].value > four
    assert 1 < lines["tokens_per_call"].value <= 2 and lab.number("popular") == (8.0, "8x")
    lab.wait_answer("Your guess: 2x to 4x. Measured:")
    lab.wait_drawn("speed", 5)
    lab.picture(artifacts / "stack_lab.png")
    assert wrong_titles(lab.notebook) == []
    lab.picture(artifacts / "stack_lab_narrow.png")

    # Without the step that verifies drafts, speculation is left out and says why; nothing fails.
    rest = [rung for rung in ALL if rung not in ("step", "speculation")]
    press(lab, "own step", rungs=rest, left_out=["speculation"])
    reason = lab.page.locator('.labkit-rungs [data-rung="speculation"]')
    assert "verified by this package's own step" in reason.inner_text()

    # The baseline alone, after the long prompt: as many bytes, and about 512 tokens read.
    lab.pick("After", "a long prompt")
    lines = press(lab, "none", rungs=[], prompt="long")
    assert 480 <= lines["speedup"].shapes["input_ids"][1] <= 544
    assert lab.number("weight_bytes")[0] == 2 * half and lab.number("popular")[0] == 1.0
