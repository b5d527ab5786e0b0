"""`flash_attention_lab` as a learner moves it: each control changes a quantity that is known beforehand, and the
ledger."""

import pytest

from tests.browser.titles import wrong_titles

HEADS, SHARED = 3, 1
FIXED = {"num_attention_heads": HEADS, "num_key_value_heads": SHARED, "dtype": "float32", "kernel": "tiled"}
DEFAULT = {"seq_len": 2048, "head_dim": 64, "block_size": 128, "causal": True} | FIXED


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab('labs.flash_attention_lab(device="cpu")', "flash_attention_lab", DEFAULT, "difference")


def matrix(tokens: int) -> int:
    """Bytes of one matrix of scores."""
    return HEADS * tokens**2 * 4


def output(tokens: int, head_dim: int = 64) -> int:
    return HEADS * tokens * head_dim * 4


def keys(tokens: int, block: int, head_dim: int = 64) -> int:
    """Bytes of K and V that causal tiles read: the first block of queries one block of keys, the second two."""
    blocks = tokens // block
    return HEADS * 2 * head_dim * 4 * block * blocks * (blocks + 1) // 2


def test_each_control_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    page = lab.page
    # Scores and weights of every head, an output and a mask; the allocator counts them.
    peak = lab.number("standard_peak")[0]
    assert 2 * matrix(2048) < peak < 2.6 * matrix(2048)
    assert lab.number("own_moved")[0] == keys(2048, 128) + 2 * output(2048) + HEADS * 2048 * 4
    lab.wait_drawn("native curve time", [128, 256, 512, 1024, 2048])
    lab.guess("4x and 4x")

    # Half the block: K and V are read about twice as often, and the output is the same.
    lines = lab.move("Block size", -1, block_size=64)
    assert lab.number("own_moved")[0] == keys(2048, 64) + 2 * output(2048) + HEADS * 2048 * 4
    assert lines["own_moved"].label == "MODELLED" and lines["own_s"].backend == "labkit tiled"
    assert lines["difference"].value == lab.number("own_difference")[0] < 1e-5

    # Heads of half the size: half the FLOPs, half the output, the same matrix.
    flops = lab.number("standard_flops")[0]
    lines = lab.move("Head size", -1, block_size=64, head_dim=32)
    assert lab.number("standard_flops")[0] == flops / 2
    assert lines["standard_formula"].value == output(2048, 32) + 2 * matrix(2048)

    # Half the length: a quarter of the matrix, by the allocator too.
    lines = lab.move("Tokens", -1, block_size=64, head_dim=32, seq_len=1024)
    assert lines["standard_peak"].label == "MEASURED" and lines["standard_peak"].value >= 2 * matrix(1024)
    assert peak / lab.number("standard_peak")[0] == pytest.approx(4, rel=0.1)
    assert lines["native_formula"].value == lines["own_formula"].value == output(1024, 32) + HEADS * 1024 * 4
    assert lines["native_peak"].value < peak / 20
    lab.wait_drawn("standard memory", [1024])

    # Not causal: every pair is needed, and every tile is visited.
    mask = page.locator(".labkit-lab .widget-checkbox input")
    lines = lab.after(mask.click, block_size=64, head_dim=32, seq_len=1024, causal=False)
    assert lines["native_flops"].value == lines["own_flops"].value == 4 * HEADS * 1024**2 * 32
    assert lines["native_s"].value > lines["native_floor_s"].value > 0

    mask.click()
    lab.push("Head size", 1)
    lab.push("Block size", 1)
    lab.move("Tokens", 2, seq_len=4096)
    lab.wait_answer("Your guess: 4x and 4x. Measured: from 2,048 to 4,096 tokens")
    lab.wait_drawn("native time", [4096])
    assert lab.number("native_speedup")[0] > 0 and lab.number("own_difference")[0] < 1e-5
    lab.picture(artifacts / "flash_attention_lab.png")
    assert wrong_titles(lab.notebook) == []
    lab.picture(artifacts / "flash_attention_lab_narrow.png")
