"""The arrival trace, replayed: nobody is lost, nothing is made from nothing, and the waste is what it is said to be."""

import time

import pytest

from labkit.kv_cache.blocks import BlockManager
from labkit.kv_cache.trace import Request, compare, load_trace, replay, summarize, tables_at

TRACE = load_trace()


def trace(*rows) -> list[Request]:
    return [Request(*row) for row in rows]


def test_the_trace_says_where_it_is_from():
    assert len(TRACE) == 307 and len(load_trace(10)) == 10
    assert all(a.arrival_s <= b.arrival_s for a, b in zip(TRACE, TRACE[1:], strict=False))
    assert all(r.prompt_tokens > 0 and r.new_tokens > 0 for r in TRACE)
    assert TRACE[0] == Request(0.0, 374, 44) and TRACE[-1] == Request(85.08, 1147, 396)


def test_one_request_by_hand():
    # Two tokens a step of 0.5 s: the prompt of 5 at 0.5 s, then 7, 9, 10 tokens; done at 10.
    samples = list(replay(trace((0.3, 5, 5)), block_size=4, num_blocks=4, tokens_per_second=4, step_s=0.5))
    assert [(s.time_s, s.tokens_held, s.slots_allocated, s.running) for s in samples] == [
        (0.0, 0, 0, 0),
        (0.5, 5, 8, 1),
        (1.0, 7, 8, 1),
        (1.5, 9, 12, 1),
        (2.0, 0, 0, 0),
    ]
    assert [s.waste for s in samples] == pytest.approx([0, 3 / 8, 1 / 8, 1 / 4, 0])


@pytest.mark.parametrize(("policy", "slots"), [("max_length", 16), ("max_new", 11)])
def test_reserved_memory_by_hand(policy, slots):
    options = {"block_size": 4, "num_blocks": 4, "max_length": 16, "max_new": 6}
    samples = list(replay(trace((0, 5, 5), (0, 5, 1)), policy=policy, tokens_per_second=4, step_s=0.5, **options))
    assert [(s.tokens_held, s.slots_allocated, s.running, s.waiting) for s in samples] == [
        (5, slots, 1, 1),
        (7, slots, 1, 1),
        (9, slots, 1, 1),
        (5, slots, 1, 0),
        (0, 0, 0, 0),
    ]


def test_the_youngest_gives_way_and_comes_back():
    # Three blocks of 4: two prompts of 4 fit, and one of them can grow.
    samples = list(
        replay(trace((0, 4, 4), (0, 4, 4)), block_size=4, num_blocks=3, watermark=1, tokens_per_second=1, step_s=1)
    )
    assert [(s.tokens_held, s.running, s.waiting, s.preemptions) for s in samples] == [
        (8, 2, 0, 0),
        (5, 1, 1, 1),  # one stopped; four of its tokens are to be computed again
        (6, 1, 1, 1),
        (7, 1, 1, 1),
        (4, 1, 0, 1),
        (5, 1, 0, 1),
        (6, 1, 0, 1),
        (7, 1, 0, 1),
        (0, 0, 0, 1),
    ]


def test_a_preempted_sequence_keeps_what_it_has_said():
    # Both have made two tokens when the block is needed; the second has two left to make when it comes back.
    rows = trace((0, 2, 4), (0, 2, 4))
    samples = list(replay(rows, block_size=4, num_blocks=2, watermark=0, tokens_per_second=1, step_s=1))
    assert [(s.tokens_held, s.running) for s in samples] == [
        (4, 2), (6, 2), (8, 2), (5, 1), (4, 1), (5, 1), (0, 0),
    ]  # fmt: skip


def test_the_watermark_holds_admission_back():
    rows = trace((0, 8, 4), (0, 8, 4))
    options = {"block_size": 4, "num_blocks": 5, "tokens_per_second": 1, "step_s": 1}
    eager, careful = (list(replay(rows, watermark=watermark, **options)) for watermark in (0, 2))
    assert eager[0].running == 2 and eager[-1].preemptions > 0
    assert careful[0].running == 1 and careful[-1].preemptions == 0


@pytest.mark.parametrize("options", [{}, {"num_blocks": 800}, {"shared_prefix": 300}, {"policy": "max_length"}])
def test_at_every_moment_the_numbers_agree(options):
    arrived = finished = 0
    for sample in replay(TRACE, **options):
        assert 0 <= sample.tokens_held <= sample.slots_allocated <= options.get("num_blocks", 4096) * 16
        assert 0 <= sample.waste < 1
        arrived = sum(r.arrival_s <= sample.time_s for r in TRACE)
        done = arrived - sample.running - sample.waiting
        assert finished <= done, "one that was done is back, or one that waits is lost"
        finished = done
    assert finished == arrived == len(TRACE) and sample.tokens_held == sample.slots_allocated == 0


def test_paging_wastes_under_four_percent_and_runs_many_more_at_once():
    longest, exact, *paged = compare(TRACE, block_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    wastes = [summary.waste for summary in paged]
    assert wastes[0] == 0 and wastes == sorted(wastes)
    by_size = {summary.block_size: summary for summary in paged}
    assert by_size[16].waste < 0.04 < by_size[256].waste
    assert by_size[256].waste < exact.waste < longest.waste
    assert (longest.policy, longest.block_size, longest.peak_running) == ("max_length", None, 65_536 // 8192)
    assert by_size[16].peak_running > 1.5 * exact.peak_running > 4 * longest.peak_running
    assert by_size[16].finished_s < exact.finished_s < longest.finished_s


def test_waste_is_half_a_block_a_sequence():
    samples = [s for s in replay(TRACE, num_blocks=10_000) if s.running > 20]
    empty = sum(s.slots_allocated - s.tokens_held for s in samples) / sum(s.running for s in samples)
    assert 6 < empty < 9  # (16 - 1) / 2


def test_a_prefix_in_common_is_held_once():
    alone, shared = summarize(TRACE), summarize(TRACE, shared_prefix=320)
    assert shared.peak_running > alone.peak_running
    rows = trace((0, 40, 2), (0, 40, 2), (0, 40, 2))
    first = next(iter(replay(rows, num_blocks=20, shared_prefix=32)))
    assert (first.running, first.tokens_held, first.slots_allocated) == (3, 32 + 3 * 8, 16 * (2 + 3))


def test_tables_at_a_moment():
    shown = tables_at(TRACE, 60, shared_prefix=64)
    sample = next(s for s in replay(TRACE, shared_prefix=64) if s.time_s >= 60)
    assert len(shown.tables) == sample.running > 10 and len(shown.used) * 16 == sample.slots_allocated
    assert len(shown.shared) == 4 and all(1 <= fill <= 16 for fill in shown.last_fill.values())
    assert sum(len(t) for t in shown.tables.values()) > len(shown.used)
    assert tables_at(TRACE, 1e6).tables == {}


def test_it_runs_a_real_block_manager(monkeypatch):
    calls = []
    append = BlockManager.append
    monkeypatch.setattr(BlockManager, "append", lambda self, *args: (calls.append(args), append(self, *args))[1])
    summarize(TRACE[:5])
    assert sum(count for _, count in calls) == sum(r.new_tokens for r in TRACE[:5])


def test_a_replay_takes_under_two_seconds():
    begin = time.process_time()
    summarize(TRACE)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"policy": "best"}, "policy: got 'best'"),
        ({"block_size": 0}, "block_size: got 0"),
        ({"num_blocks": 100}, "num_blocks: got 100; takes at least"),
        ({"watermark": 4000}, "num_blocks: got 4096; takes at least"),
        ({"policy": "max_length", "max_length": 2048}, "max_length: got 2048; takes at least"),
        ({"policy": "max_new", "max_new": 100}, "max_new: got 100; takes at least"),
        ({"policy": "max_length", "num_blocks": 10}, "num_blocks: got '160 slots'"),
        ({"tokens_per_second": 0}, "tokens_per_second: got 0"),
        ({"step_s": 0}, "step_s: got 0"),
        ({"shared_prefix": -1}, "shared_prefix: got -1"),
    ],
)
def test_wrong_arguments_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        replay(TRACE, **options)


def test_no_requests_are_refused():
    with pytest.raises(ValueError, match="trace: got 'no request'"):
        replay([])
    with pytest.raises(ValueError, match="limit: got 0"):
        load_trace(0)
