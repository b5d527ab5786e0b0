import pytest

from labkit.kv_cache.trace import Request, load_trace
from labkit.labs import _paging_compute, paging_lab
from labkit.labs._paging_blocks import COLUMNS, ROWS, SHARED, TINTS
from labkit.labs._paging_figure import CLAIM, FLOOR, SYMBOLS
from labkit.labs._paging_result import BLOCK_SIZES, first_blocks
from labkit.labs.paging import empty_share

WAIT_S = 60.0
TRACE = load_trace(100)


@pytest.fixture
def lab(ledger, monkeypatch):
    """The lab over the first hundred requests, which take a third of the time."""
    monkeypatch.setattr(_paging_compute, "load_trace", lambda: TRACE)
    lab = paging_lab()
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.knobs[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def traces(lab) -> dict:
    return {trace.name: trace for trace in lab.figure.data}


def grid(lab) -> str:
    (title,) = (note.text for note in lab.figure.layout.annotations if note.name == "blocks")
    return title


def test_each_knob_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, block_size=64)
    move(lab, max_new=1024)
    move(lab, shared_prefix=256)
    lines = [m for m in ledger.read() if m.name == "paging_lab.waste"]
    keys = ("block_size", "max_new", "shared_prefix")
    assert [tuple(m.params[key] for key in keys) for m in lines] == [
        (16, 8192, 0),
        (64, 8192, 0),
        (64, 1024, 0),
        (64, 1024, 256),
    ]
    assert [m.value for m in lines] == [result.paged.waste for result in lab.finished]


def test_the_replays_are_drawn_over_time_with_the_claim_on_the_same_axis(lab):
    for way, replay in (("paged", lab.result.paged), ("reserved", lab.result.reserved)):
        end = 1.3 * lab.result.paged.finished_s
        shown = [s for s in replay.samples if s.time_s <= end]
        held = [s for s in shown if s.slots_allocated]
        waste = traces(lab)[f"{way} waste"]
        assert list(waste.x) == [s.time_s for s in held] and len(held) > 50
        assert list(waste.y) == [100 * max(s.waste, FLOOR) for s in held]
        assert list(traces(lab)[f"{way} running"].y) == [s.running for s in shown]
        assert list(traces(lab)[f"{way} waiting"].y) == [s.waiting for s in shown]
    assert max(traces(lab)["reserved waiting"].y) > 10
    assert list(traces(lab)["claim 1"].x) == list(lab.figure.layout.xaxis.range) == [0, end]
    for name in ("claim 1", "claim 3"):
        assert list(traces(lab)[name].y) == [100 * CLAIM] * 2
        assert traces(lab)[name].yaxis == traces(lab)["paged waste" if name == "claim 1" else "paged by size"].yaxis


def test_waste_by_block_size_grows_and_earlier_points_stay(lab):
    first = lab.result
    move(lab, block_size=256)
    move(lab, shared_prefix=256)
    now, before = traces(lab)["paged by size"], traces(lab)["earlier paged"]
    assert (now.x, now.y) == ((256,), (100 * lab.result.paged.waste,))
    assert now.marker.symbol == (SYMBOLS[256],) and before.marker.symbol == (SYMBOLS[0],) * 2
    assert before.x == (16, 256) and before.y == tuple(100 * r.paged.waste for r in lab.finished[:2])
    assert before.marker.opacity < 1
    length = lab.result.paged.mean_length
    formula = dict(zip(traces(lab)["formula"].x, traces(lab)["formula"].y, strict=True))
    expected = {size: 100 * max(FLOOR, (size - 1) / 2 / length) for size in BLOCK_SIZES if size > 1}
    assert formula == pytest.approx(expected)
    move(lab, max_new=1024)
    move(lab, block_size=1)
    assert traces(lab)["paged by size"].y == (100 * FLOOR,) and traces(lab)["paged by size"].text == ("0%",)
    assert set(traces(lab)["reserved by size"].y) == {100 * lab.result.reserved.waste}
    assert 100 * first.reserved.waste in traces(lab)["earlier reserved"].y


def test_each_block_is_a_cell_filled_as_far_as_it_holds_tokens(lab):
    move(lab, block_size=64)
    blocks = first_blocks(lab.result.tables, COLUMNS * ROWS)
    used = [block for block in blocks if block.sequences]
    frames, fills, words = (traces(lab)[name] for name in ("frames", "fills", "sequences"))
    assert len(frames.x) == 256 and 30 < len(used) < 256
    assert [round(x + COLUMNS * (y - 0.5)) for x, y in zip(words.x, words.y, strict=True)] == [b.number for b in used]
    full = abs(frames.y[0])
    assert [abs(y) / full for y in fills.y] == pytest.approx([block.fill / 64 for block in used])
    assert min(abs(y) for y in fills.y) < 0.9 * full
    assert list(words.text) == [f"{block.sequences[0]}" for block in used]
    colours = {}
    for block, colour in zip(used, fills.marker.color, strict=True):
        assert colours.setdefault(block.sequences[0], colour) == colour in TINTS
    assert len(set(colours.values())) == min(len(colours), len(TINTS))
    some = next(block for block in used if block.fill < 64)
    hover = fills.hovertext[used.index(some)]
    assert f"Block {some.number}<" in hover and f"sequence {some.sequences[0]}," in hover
    assert f"{some.fill} of 64 slots" in hover
    free = next(block for block in blocks if not block.sequences)
    assert frames.hovertext[free.number].endswith("free")
    assert "Blocks 0 to 255 of 1,024, 42.5 s" in grid(lab) and "shared" not in grid(lab)


def test_shared_blocks_are_marked(lab):
    move(lab, shared_prefix=256)
    count = len(lab.result.tables.tables)
    fills, words = traces(lab)["fills"], traces(lab)["sequences"]
    marked = [i for i, colour in enumerate(fills.marker.color) if colour == SHARED]
    assert len(marked) == 256 // 16 == len(lab.result.tables.shared)
    assert {words.text[i] for i in marked} == {f"<b>x{count}</b>"}
    assert all(f"shared by {count} sequences" in fills.hovertext[i] for i in marked)
    assert "shared" in grid(lab)


def test_a_pool_that_is_shown_whole_says_so(lab):
    move(lab, block_size=256)
    assert "All 256 blocks" in grid(lab)
    used = len(lab.result.tables.used)
    assert len(traces(lab)["fills"].x) == used


def test_the_guess_is_answered_by_the_large_blocks_alone(lab):
    lab.prediction.guess.value = "about 12%"
    move(lab, shared_prefix=256)
    move(lab, block_size=256)
    assert lab.prediction._answer is None
    move(lab, shared_prefix=0)
    waste = lab.result.paged.waste
    assert f"Your guess: about 12%. Measured: {waste:.0%}; blocks of 16: " in lab.prediction._verdict.value
    assert empty_share(lab.finished[-1:]).startswith(f"{waste:.0%}. Half a block")


def test_a_request_that_cannot_be_served_is_shown_and_the_next_move_works(lab):
    kept, lab.spec.compute._trace = lab.spec.compute._trace, (Request(0.0, 9000, 10),)
    lab.spec.knobs["block_size"].value = 4
    assert lab.wait(WAIT_S)
    assert "max_length: got 8192; takes at least 9010" in lab.status.text and isinstance(lab.error, ValueError)
    lab.spec.compute._trace = kept
    move(lab, block_size=32)
    assert lab.result.params.block_size == 32 and "labkit-error" not in lab.status.text
