"""`speculative_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the ledger."""

import pytest

from tests.browser.titles import wrong_titles

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


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab('labs.speculative_lab(device="cpu")', "speculative_lab", DEFAULT, "speculative_s", height=1700)


def count(lab, kind: str) -> int:
    """Tokens of a kind in the text."""
    return lab.page.locator(f".labkit-tokens .labkit-{kind}").count()


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    assert lab.number("drafted_per_call") == (3.0, "3")
    lab.guess("3 to 5")

    lines = lab.move("Draft length", -1, num_assistant_tokens=2)
    assert lab.number("drafted_per_call") == (2.0, "2") and lines["drafted_per_call"].value == 2.0
    made = lab.number("tokens_per_target_call")[0]
    assert 1 < made <= 3 and lines["tokens_per_target_call"].value == made
    assert lines["modelled_speedup"].label == "MODELLED" and lines["speedup"].label == "MEASURED"
    lab.wait_drawn("earlier", [3])

    # Twice the draft: 4 a call, and no token more is kept of the first two.
    lab.move("Draft length", 2, num_assistant_tokens=4)
    assert lab.number("drafted_per_call") == (4.0, "4")
    assert lab.number("tokens_per_target_call")[0] >= made - 0.05
    kept, refused = count(lab, "accepted"), count(lab, "rejected")
    assert kept > 0 and refused > 0
    # The very last token has no room for a draft before it.
    assert count(lab, "plain") <= 1
    calls = lab.page.locator(".labkit-tokens .labkit-call").count()
    assert kept + count(lab, "residual") + count(lab, "bonus") + 1 in range(calls, 64 + 1)

    lab.move("Draft length", 3, num_assistant_tokens=7)
    lab.wait_answer("Your guess: 3 to 5. Measured:")
    lab.wait_drawn("speed-up", [7])
    lab.picture(artifacts / "speculative_lab.png")
    assert wrong_titles(lab.notebook) == []
    lab.picture(artifacts / "speculative_lab_narrow.png")

    # Of a tree more is drafted than it is deep, and verified in one call.
    lab.push("Draft length", -4)
    lines = lab.choose("Draft is", "a tree (EAGLE)", shape="tree")
    assert lab.number("drafted_per_call")[0] == lines["drafted_per_call"].value == 6.0


def test_other_proposers_weights_and_temperatures_do_as_they_must(lab):
    # The same weights draft for themselves: always right, and slower for it.
    lab.pick("Draft is", "a chain")
    lab.move("Proposer", 2, proposer="int4 copy")
    assert lab.number("acceptance_rate")[0] > 0.9 and count(lab, "bonus") > count(lab, "residual")
    assert lab.number("draft_cost")[0] > 0.5

    lab.push("Proposer", -1)
    copying = {"proposer": "prompt lookup", "prompt": "copy_heavy"}
    lines = lab.choose("Prompt", "to copy from", **copying)
    assert lines["tokens_per_target_call"].value > 1.5

    cold = lab.number("acceptance_rate")[0]
    lab.move("Temperature", 6, temperature=1.5, **copying)
    assert lab.number("acceptance_rate")[0] < cold, "at random there is little to copy"

    # Nothing drafted, other weights.
    lab.pick("Target's weights", "float32")
    lines = lab.move("Draft length", -3, num_assistant_tokens=0, temperature=1.5, weights="float32", **copying)
    assert lab.number("tokens_per_target_call") == (1.0, "1.00") and lines["tokens_per_target_call"].value == 1.0
    assert count(lab, "plain") == lab.page.locator(".labkit-tokens .labkit-call").count() - 1 > 10
    assert lines["plain_s"].dtype == "float32"
