"""`quantization_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import pytest

DEFAULT = {"bits": 4, "group_size": 64, "method": "RTN", "model": "smollm2-135m", "corpus": "your text"}
# One window of a text of its own, so that a perplexity takes a second and not ten.
LAB = 'labs.quantization_lab(device="cpu", text=load_text()[:2400])'


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab(LAB, "quantization_lab", DEFAULT, "bits_per_weight")


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    assert lab.number("bits_per_weight") == (4.375, "4.375")
    # 30 layers of 576 x (576 + 192 + 192 + 576) and three matrices of 576 x 1536.
    weights = 30 * (576 * 1536 + 3 * 576 * 1536)
    assert lab.number("code_bytes") == (weights * 4 / 8, "53.1 MB")
    whole = lab.number("model_bytes")[0]

    lines = lab.move("Bits", 1, bits=8)
    assert lab.number("bits_per_weight") == (8.375, "8.375")
    assert lab.number("code_bytes") == (weights, "106 MB")
    assert lab.number("model_bytes")[0] == whole + weights * 4 / 8
    assert lines["code_bytes"].value == weights and lines["perplexity"].label == "MEASURED"
    lab.wait_drawn("perplexity", [8.375])
    lab.wait_drawn("earlier perplexity", [4.375])

    lab.push("Bits", -1)  # the setting in between gives way to the next
    lab.move("Group", -1, group_size=32)
    assert lab.number("bits_per_weight") == (4.75, "4.75")
    assert lab.number("code_bytes")[0] == weights * 4 / 8

    lines = lab.move("Method", 2, group_size=32, method="GPTQ")
    assert lines["block_error_ratio"].params == DEFAULT | {
        "group_size": 32,
        "method": "GPTQ",
        "layer": 15,
        "calibration_tokens": 2048,
    }
    assert 0 < lines["block_error_ratio"].value < 1
    assert lab.number("perplexity")[1] == "not recorded"
    # The columns' order: 32 bits for each input of each matrix.
    inputs = 30 * (6 * 576 + 1536)
    assert lab.number("bits_per_weight")[0] == pytest.approx(4.75 + 32 * inputs / weights)
    lab.wait_drawn("error in detail", ["RTN, median<br>of all layers", "RTN,<br>layer 15", "GPTQ,<br>layer 15"])
    lab.picture(artifacts / "quantization_lab.png")
