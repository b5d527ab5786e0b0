"""`eviction_lab` as a learner moves it: each slider changes a quantity that is known beforehand, and the ledger."""

import pytest

from tests.browser.lab import DRAWN_MS

DEFAULT = {"method": "sinks", "budget": 0.25, "depth": 0.1, "model": "smollm2-135m"}
# Keys and values of a token: 30 layers with 3 KV heads of 64 channels in float32.
TOKEN = 2 * 30 * 3 * 64 * 4


@pytest.fixture(scope="module")
def lab(open_lab):
    return open_lab('labs.eviction_lab(device="cpu")', "eviction_lab", DEFAULT, "perplexity")


def held(lab) -> tuple[int, int]:
    """Tokens a KV head that the cache holds, of how many of the prompt."""
    now, _, seen = lab.number("held")[1].split()
    return int(now), int(seen)


def wait_map(lab, layer: int, row: list[int]) -> None:
    """Wait until a layer's row of the map on the page is this; it comes after the lab's own words."""
    lab.page.wait_for_function(
        """([layer, row]) => {
            const plot = document.querySelector('.labkit-lab .js-plotly-plot');
            const held = plot?.data?.find(trace => trace.name === 'kept')?.z?.[layer];
            return JSON.stringify(held && Array.from(held)) === JSON.stringify(row)
                && plot._fullLayout.width > 0.9 * plot.closest('.labkit-lab').clientWidth;
        }""",
        arg=[layer, row],
        timeout=DRAWN_MS,
    )


def test_each_slider_moves_a_known_quantity_and_writes_the_ledger(lab, artifacts):
    kept, seen = held(lab)
    # The prompt's last token is still to come.
    assert kept == round(0.25 * (seen + 1)) and lab.number("digits_kept") == (0, "0%")
    # The four sinks' keys once more, as they came in.
    assert lab.number("cache_bytes")[0] == kept * TOKEN + 4 * TOKEN // 2
    wait_map(lab, 29, [3] * 4 + [0] * (seen - kept) + [3] * (kept - 4))
    assert lab.number("full_needles")[0] >= 9

    lines = lab.move("Budget", 1, budget=0.125)
    assert held(lab) == (round(0.125 * (seen + 1)), seen)
    assert lines["cache_bytes"].value == held(lab)[0] * TOKEN + 4 * TOKEN // 2
    assert lines["perplexity"].value > lines["full_perplexity"].value and lines["perplexity"].label == "MEASURED"

    lab.push("Budget", -1)  # the setting in between gives way to the next
    lines = lab.move("Method", 2, method="snapkv")
    # An int32 a token and KV head says where it stood; the number is not all gone.
    assert lines["cache_bytes"].value == kept * (TOKEN + 30 * 3 * 4)
    assert lab.number("digits_kept")[0] > 0
    assert lines["needles_found"].value >= 7 and lines["needles_found"].shapes == {"prompts": [10, 10]}
    lab.picture(artifacts / "eviction_lab.png")

    # A window holds the number where it stands near the end, and finds few of those that stand anywhere.
    lab.push("Method", -3)
    lines = lab.move("Depth", 4, method="window", depth=0.9)
    kept, seen = held(lab)  # of another prompt, which may be shorter
    assert kept == round(0.25 * (seen + 1))
    assert lines["cache_bytes"].value == kept * TOKEN and lines["needles_found"].value <= 4
    wait_map(lab, 0, [0] * (seen - kept) + [3] * kept)
    assert lines["digits_kept"].value == 1 and lab.number("digits_kept") == (1, "100%")

    lines = lab.move("Method", -1, method="full", depth=0.9)
    kept, seen = held(lab)
    assert kept == seen and lines["cache_bytes"].value == seen * TOKEN == lines["full_bytes"].value
    assert lines["needles_found"].value >= 9 and lab.number("perplexity_ratio")[0] == 1
