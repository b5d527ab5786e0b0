"""`roofline_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import pytest

DEFAULT = {"batch": 1, "seq_len": 128, "dtype": "float32", "model": "smollm2-135m"}
OPS, PHASES = 18, 2


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab('labs.roofline_lab(device="cpu")', "roofline_lab", DEFAULT, "ttft")


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(lab):
    kv, text = lab.number("kv_bytes")
    weights, _ = lab.number("weight_bytes")
    # 128 tokens, 30 layers, keys and values, 3 KV heads of 64, 4 bytes.
    assert (kv, text) == (128 * 30 * 2 * 3 * 64 * 4, "5.90 MB")
    lab.wait_drawn("whole step", PHASES)

    lines = lab.move("Batch", 1, batch=2)
    assert lines["ttft"].value > 0 and lines["tpot"].value > 0
    assert lab.number("kv_bytes") == (2 * kv, "11.8 MB")
    assert lab.number("weight_bytes")[0] == pytest.approx(weights, rel=1e-4)  # a row of the embedding more

    lab.move("Context", 1, batch=2, seq_len=256)
    assert lab.number("kv_bytes") == (4 * kv, "23.6 MB")

    lab.push("Batch", -1)  # the setting in between gives way to the next
    lab.move("dtype", 1, seq_len=256, dtype="bfloat16")
    assert lab.number("kv_bytes") == (kv, "5.90 MB")
    assert lab.number("weight_bytes")[0] == weights / 2


def test_a_slider_moved_through_three_values_measures_the_last_and_a_guess_is_answered(lab, artifacts, tmp_path):
    ledger = lab.notebook.server.ledger
    lab.after(lab.button("Reset").click)
    lab.guess("8x")
    before = len(ledger.read())
    lab.move("Batch", 3, batch=8)
    assert {line.params["batch"] for line in ledger.read()[before:] if "batch" in line.params} == {8}
    lab.wait_answer("Your guess: 8x. Measured:")

    lab.move("Batch", -2, batch=2)
    with lab.page.expect_download() as download:
        lab.page.get_by_text("Export CSV").click()
    assert download.value.suggested_filename == "roofline_lab.csv"
    download.value.save_as(tmp_path / "lab.csv")
    header, *rows = (tmp_path / "lab.csv").read_text().splitlines()
    assert header.startswith("batch,seq_len,dtype,model,")
    assert len(rows) == 3 * PHASES * (OPS + 1)
    assert [row.split(",")[0] for row in rows[:: PHASES * (OPS + 1)]] == ["1", "8", "2"]

    lab.wait_drawn("whole step", PHASES)
    lab.wait_drawn("earlier", 2 * PHASES)
    lab.picture(artifacts / "roofline_lab.png")
