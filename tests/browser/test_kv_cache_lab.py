"""`kv_cache_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import pytest

GROUPS = {"q_group_size": 32, "residual_length": 32}
DEFAULT = {"seq_len": 4096, "num_key_value_heads": 3, "bits": 16, "model": "smollm2-135m"} | GROUPS
LAYERS, HEAD_DIM = 30, 64


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab('labs.kv_cache_lab(device="cpu")', "kv_cache_lab", DEFAULT, "cache_bytes")


def full(tokens: int, heads: int) -> int:
    """Bytes in 16 bits."""
    return LAYERS * 2 * heads * HEAD_DIM * tokens * 2


def rounded(tokens: int, recent: int, heads: int, bits: int) -> int:
    """Bytes with a bit more a value for its share of a scale and a minimum, and a counter a layer."""
    values = 2 * heads * HEAD_DIM
    return LAYERS * (values * (tokens - recent) * (bits + 1) // 8 + values * recent * 2 + 4)


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    own = full(4096, 3)
    assert lab.number("cache_bytes") == (own, "94.4 MB") and lab.number("predicted_bytes")[0] == own

    lab.guess("12x")
    # Three KV heads to one: a third.
    lines = lab.move("KV heads", 1, num_key_value_heads=1)
    assert lab.number("cache_bytes") == (own / 3, "31.5 MB")
    assert lines["cache_bytes"].value == own / 3 and lines["cache_bytes"].label == "MEASURED"
    assert lines["attention_s"].value > lines["floor_s"].value / 2 > 0 and "perplexity" not in lines

    # 16 bits to 4 in groups of 32: 5/16, but for the 64 tokens that are recent and a counter in each layer.
    small = rounded(4096, 64, 1, 4)
    assert small == own / 3 * 5 / 16 + LAYERS * (2 * HEAD_DIM * 64 * 11 / 8 + 4)
    lab.push("Bits", 1)  # the setting in between gives way to the next
    lines = lab.move("Bits", 1, num_key_value_heads=1, bits=4)
    assert lab.number("cache_bytes") == (small, "10.2 MB") and lab.number("predicted_bytes")[0] == small
    assert lines["cache_bytes"].value == lines["predicted_bytes"].value == small
    assert lab.number("smaller") == (pytest.approx(own / small), "9.28x")
    lab.wait_drawn("bytes", [4096])
    lab.wait_answer("Your guess: 12x. Measured: 9.28x")

    lines = lab.move("Tokens", 1, num_key_value_heads=1, bits=4, seq_len=8192)
    assert lab.number("cache_bytes")[0] == rounded(8192, 64, 1, 4)
    assert lab.number("cache_bytes")[0] - small == LAYERS * 2 * HEAD_DIM * 4096 * 5 / 8
    lab.wait_drawn("bytes", [8192])
    lab.wait_drawn("earlier bytes", [4096, 4096, 4096])

    lines = lab.move("KV heads", -1, num_key_value_heads=3, bits=4, seq_len=8192)
    assert lines["perplexity"].value == pytest.approx(lines["full_perplexity"].value, rel=0.05)
    assert lines["perplexity"].shapes == {"tokens": [511, 511]}
    lab.wait_drawn("perplexity", [16 / 5])
    lab.picture(artifacts / "kv_cache_lab.png")
