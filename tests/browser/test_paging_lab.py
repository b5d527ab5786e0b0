"""`paging_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import dataclasses

import pytest

from labkit.kv_cache.trace import load_trace, summarize
from tests.browser.lab import DRAWN_MS

SLOTS = 65_536
FIXED = {"max_length": 8192, "slots": SLOTS, "tokens_per_second": 20.0}
DEFAULT = {"block_size": 16, "max_new": 8192, "shared_prefix": 0} | FIXED


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab("labs.paging_lab()", "paging_lab", DEFAULT, "reserved_finished_s")


def reserved(max_new: int) -> float:
    """What the replay in reserved memory leaves empty."""
    options = {"policy": "max_new", "block_size": 1, "num_blocks": SLOTS, "max_length": 8192}
    return summarize(load_trace(), max_new=max_new, **options).waste


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    page = lab.page
    waste, text = lab.number("waste")
    assert 0 < waste < 0.04 and text == f"{100 * waste:.2g}%"
    assert lab.number("reserved_peak") == (SLOTS // 8192, "8")
    entries = lab.number("table_entries")[0]

    lab.guess("about 12%")
    lines = lab.move("Block size", 4, block_size=256)
    assert lab.number("waste")[0] == lines["waste"].value > 0.04
    assert lab.number("table_entries")[0] < entries / 8
    answer = f"Your guess: about 12%. Measured: {lab.number('waste')[1]}; blocks of 16: {text}"
    lab.wait_answer(answer)

    lines = lab.move("Block size", -6, block_size=1)
    assert lab.number("waste") == (0.0, "0%")
    assert lines["waste"].value == 0 and lines["waste"].label == "MEASURED"
    lab.wait_drawn("paged by size", [1])

    lab.push("Block size", 2)  # back; the setting in between gives way to the next
    lab.move("Reserved", -3, max_new=1024)
    assert lab.number("reserved_waste")[0] == pytest.approx(reserved(1024))
    lines = lab.move("Reserved", 1, max_new=2048)
    assert lab.number("reserved_waste")[0] == lines["reserved_waste"].value == pytest.approx(reserved(2048))
    assert lab.number("waste") == (waste, text)

    lines = lab.move("System prompt", 1, max_new=2048, shared_prefix=256)
    asked = [dataclasses.replace(r, prompt_tokens=r.prompt_tokens + 256) for r in load_trace()]
    assert lines["waste"].value == pytest.approx(summarize(asked, shared_prefix=256).waste)
    assert lines["table_entries"].value > entries + 16 * 20, "16 blocks more in each of some 26 tables"
    lab.wait_drawn("paged by size", [16])
    page.wait_for_function(
        "() => document.querySelector('.labkit-lab .js-plotly-plot').data"
        ".find(trace => trace.name === 'sequences').text.filter(text => text.startsWith('<b>x')).length === 256 / 16",
        timeout=DRAWN_MS,
    )
    lab.picture(artifacts / "paging_lab.png")
