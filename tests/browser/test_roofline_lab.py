"""`roofline_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import time

import pytest

DEFAULT = {"batch": 1, "seq_len": 128, "dtype": "float32", "model": "smollm2-135m"}
OPS, PHASES = 18, 2
DRAWN_S = 30


@pytest.fixture(scope="module")
def opened(open_for_module):
    notebook = open_for_module("01_bottleneck_analysis.ipynb", height=1500)
    notebook.run_labs()
    assert notebook.errors() == []
    wait_drawn(notebook, earlier=0, now=PHASES, fills=True)
    return notebook


@pytest.fixture
def notebook(opened):
    """The lab at its first setting, measured, with no history."""
    before = len(opened.server.ledger.read())
    opened.page.get_by_role("button", name="Reset", exact=True).click()
    wait_for(opened, DEFAULT, before)
    assert opened.page.locator(".labkit-lab").count() == 1
    return opened


def wait_for(notebook, setting: dict[str, object], before: int) -> None:
    """Wait until a setting's ledger lines are there and the lab says that it has measured."""
    for name in ("roofline_lab.tpot", "roofline_lab.ttft"):
        line = notebook.wait_for_ledger(lambda m, name=name: m.name == name and m.params == setting, before)
        assert line.value > 0
    notebook.wait_measured()
    assert notebook.errors() == []


def move(notebook, slider: str, steps: int, setting: dict[str, object]) -> set[tuple]:
    """Move a slider by keyboard and wait for the new setting; returns every setting that was measured meanwhile."""
    before = len(notebook.server.ledger.read())
    notebook.move(slider, steps)
    wait_for(notebook, setting, before)
    return {tuple(sorted(line.params.items())) for line in notebook.server.ledger.read()[before:]}


def wait_drawn(notebook, **wanted: object) -> None:
    """Wait until the figure on the page holds so many earlier and present whole steps, as wide as the lab.

    The figure's data come in messages of their own, after the line that says that the lab has measured.
    """
    deadline = time.monotonic() + DRAWN_S
    while (held := drawn(notebook)) != wanted:
        assert time.monotonic() < deadline, f"the figure holds {held}, not {wanted}"
        notebook.page.wait_for_timeout(100)


def drawn(notebook) -> dict[str, object]:
    """What the figure on the page holds: earlier and present whole steps, and whether it is as wide as the lab."""
    return notebook.page.evaluate(
        """() => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            const points = name => plot?.data?.find(trace => trace.name === name)?.x?.length ?? null;
            const fills = plot?._fullLayout?.width > 0.9 * plot?.closest('.labkit-lab').clientWidth;
            return {earlier: points('earlier'), now: points('whole step'), fills};
        }"""
    )


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(notebook):
    kv, text = notebook.number("kv_bytes")
    weights, _ = notebook.number("weight_bytes")
    # 128 tokens, 30 layers, keys and values, 3 KV heads of 64, 4 bytes.
    assert (kv, text) == (128 * 30 * 2 * 3 * 64 * 4, "5.90 MB")

    move(notebook, "Batch", 1, DEFAULT | {"batch": 2})
    assert notebook.number("kv_bytes") == (2 * kv, "11.8 MB")
    assert notebook.number("weight_bytes")[0] == pytest.approx(weights, rel=1e-4)  # a row of the embedding more

    move(notebook, "Context", 1, DEFAULT | {"batch": 2, "seq_len": 256})
    assert notebook.number("kv_bytes") == (4 * kv, "23.6 MB")

    move(notebook, "Batch", -1, DEFAULT | {"seq_len": 256})
    move(notebook, "dtype", 1, DEFAULT | {"seq_len": 256, "dtype": "bfloat16"})
    assert notebook.number("kv_bytes") == (kv, "5.90 MB")
    assert notebook.number("weight_bytes")[0] == weights / 2


def test_a_slider_moved_through_three_values_measures_the_last(notebook):
    measured = move(notebook, "Batch", 3, DEFAULT | {"batch": 8})
    assert measured == {tuple(sorted((DEFAULT | {"batch": 8}).items()))}


def test_a_guess_is_answered_and_the_csv_holds_what_was_measured(notebook, artifacts, tmp_path):
    page = notebook.page
    page.locator(".labkit-prediction .widget-toggle-button", has_text="8x").click()
    for steps, batch in ((3, 8), (-1, 4), (-1, 2)):
        move(notebook, "Batch", steps, DEFAULT | {"batch": batch})
    page.locator(".labkit-prediction", has_text="Your guess: 8x. Measured:").wait_for(timeout=10_000)
    with page.expect_download() as download:
        page.get_by_text("Export CSV").click()
    assert download.value.suggested_filename == "roofline_lab.csv"
    download.value.save_as(tmp_path / "lab.csv")
    header, *rows = (tmp_path / "lab.csv").read_text().splitlines()
    assert header.startswith("batch,seq_len,dtype,model,")
    assert len(rows) == 4 * PHASES * (OPS + 1)
    assert [row.split(",")[0] for row in rows[:: PHASES * (OPS + 1)]] == ["1", "8", "4", "2"]
    move(notebook, "Batch", 3, DEFAULT | {"batch": 16})
    wait_drawn(notebook, earlier=4 * PHASES, now=PHASES, fills=True)
    page.mouse.move(0, 0)
    page.locator(".labkit-lab").screenshot(path=artifacts / "roofline_lab.png")
