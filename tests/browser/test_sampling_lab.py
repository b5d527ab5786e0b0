"""`sampling_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the ledger."""

import pytest

from tests.browser.titles import wrong_titles

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


@pytest.fixture(scope="module")
def lab(open_lab):
    source = 'labs.sampling_lab(device="cpu")'
    return open_lab(source, "sampling_lab", DEFAULT, "tokens_per_target_call", height=1700)


def texts(lab) -> list[str]:
    """What the three columns hold."""
    return [text.partition("tokens")[2] for text in lab.page.locator(".labkit-text").all_inner_texts()]


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    unlikely = lab.page.locator(".labkit-text .labkit-unlikely")
    warm, first = lab.number("kept")[0], texts(lab)
    assert 1 < warm < 1000 and lab.number("mass_cut")[0] <= 0.1
    lab.guess("it stays")

    # Temperature 0: one token can be drawn, and the three texts are one.
    lines = lab.move("Temperature", -4, temperature=0.0)
    assert lab.number("kept") == (1.0, "1") and lab.number("entropy_bits")[0] == 0.0
    assert lines["different_texts"].value == lab.number("different_texts")[0] == 1.0
    assert lines["acceptance_rate"].value == lines["expected_acceptance"].value
    assert lines["acceptance_rate"].label == "MEASURED" and lines["expected_acceptance"].label == "MODELLED"
    greedy, accepted = texts(lab), lab.number("acceptance_rate")[0]
    assert len(set(greedy)) == 1 and unlikely.count() == 0

    # Hotter than the default: more may come, and the texts differ.
    lines = lab.move("Temperature", 6, temperature=1.2)
    assert lab.number("kept")[0] > warm and lines["different_texts"].value == 3.0
    assert unlikely.count() > 0
    lab.wait_answer("Your guess: it stays. Measured:")

    # The same temperature with one token kept: greedy's text again.
    lines = lab.move("top_k", 1, temperature=1.2, top_k=1)
    assert lab.number("kept") == (1.0, "1") and texts(lab) == greedy
    # By the same rule; a call that is cut short, or another number of threads, may count a token more or less.
    assert lines["acceptance_rate"].value == pytest.approx(accepted, abs=0.05)

    lines = lab.move("top_k", 3, temperature=1.2, top_k=10)
    assert 1 < lines["kept"].value <= 10 and lines["entropy"].value > 0

    # A smaller top_p never keeps more.
    kept = lines["kept"].value
    lines = lab.move("top_p", -3, temperature=1.2, top_k=10, top_p=0.5)
    assert lines["kept"].value <= kept
    lab.wait_drawn("now", [1.2])
    lab.picture(artifacts / "sampling_lab.png")
    assert wrong_titles(lab.notebook) == []
    lab.picture(artifacts / "sampling_lab_narrow.png")

    # The default again, measured a second time: the same seeds draw the same texts.
    lab.after(lab.button("Reset").click)
    assert texts(lab) == first and lab.number("kept")[0] == warm


def test_prompt_seed_draft_and_weights_are_those_that_are_chosen(lab):
    first = texts(lab)
    lab.choose("First seed", "1", seed=1)
    assert texts(lab)[:2] == first[1:], "the second text is the first"
    lines = lab.choose("Drafts", "its own int4 copy", seed=1, proposer="int4 copy")
    assert lines["acceptance_rate"].value > 0.9, "the same weights draft for themselves"
    lab.pick("Prompt", 2)
    lines = lab.choose("Weights", "float32", seed=1, proposer="int4 copy", prompt=2, weights="float32")
    assert lines["kept"].dtype == "float32"
    assert "birthday" in lab.page.locator(".labkit-asked").inner_text()
