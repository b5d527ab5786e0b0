"""`roofline_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import pytest

DEFAULT = {"batch": 1, "seq_len": 128, "dtype": "float32", "model": "smollm2-135m"}


@pytest.fixture
def notebook(open_notebook):
    notebook = open_notebook("01_bottleneck_analysis.ipynb")
    notebook.run_labs()
    assert notebook.errors() == []
    assert notebook.page.locator(".labkit-lab").count() == 1
    return notebook


def move(notebook, slider: str, steps: int, expected: dict[str, object]) -> None:
    """Move a slider by keyboard and wait for the last of the ledger lines that the new setting writes."""
    before = len(notebook.server.ledger.read())
    notebook.move(slider, steps)
    for name in ("roofline_lab.tpot", "roofline_lab.ttft"):
        line = notebook.wait_for_ledger(lambda m, name=name: m.name == name and m.params == expected, before)
        assert line.value > 0
    notebook.wait_measured()
    assert notebook.errors() == []


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(notebook, artifacts):
    page = notebook.page
    kv, text = notebook.number("kv_bytes")
    weights, _ = notebook.number("weight_bytes")
    # 128 tokens, 30 layers, keys and values, 3 KV heads of 64, 4 bytes.
    assert kv == 128 * 30 * 2 * 3 * 64 * 4
    assert text == "5.90 MB"

    move(notebook, "Batch", 1, DEFAULT | {"batch": 2})
    assert notebook.number("kv_bytes") == (2 * kv, "11.8 MB")

    move(notebook, "Context", 1, DEFAULT | {"batch": 2, "seq_len": 256})
    assert notebook.number("kv_bytes") == (4 * kv, "23.6 MB")
    assert "256" in page.locator(".labkit-groups caption").first.inner_text()

    move(notebook, "Batch", -1, DEFAULT | {"seq_len": 256})
    move(notebook, "dtype", 1, DEFAULT | {"seq_len": 256, "dtype": "bfloat16"})
    assert notebook.number("kv_bytes") == (kv, "5.90 MB")
    assert notebook.number("weight_bytes")[0] == weights / 2
    page.locator(".labkit-lab").screenshot(path=artifacts / "roofline_lab_moved.png")


def test_the_guess_is_answered_by_the_measurement_and_the_csv_holds_it(notebook, artifacts, tmp_path):
    page = notebook.page
    page.locator(".labkit-prediction .widget-toggle-button", has_text="8x").click()
    move(notebook, "Batch", 3, DEFAULT | {"batch": 8})
    answer = page.locator(".labkit-prediction", has_text="Your guess: 8x. Measured:")
    answer.wait_for(timeout=10_000)
    with page.expect_download() as download:
        page.get_by_text("Export CSV").click()
    assert download.value.suggested_filename == "roofline_lab.csv"
    download.value.save_as(tmp_path / "lab.csv")
    table = (tmp_path / "lab.csv").read_text().splitlines()
    # A header; 18 ops and a total for each of two phases, for each of at least the two settings at which it stood.
    assert (len(table) - 1) % 38 == 0 and len(table) > 2 * 38
    assert table[0].startswith("batch,seq_len,dtype,model,")
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "roofline_lab.png")
