import dataclasses
import functools
import math

import pytest

from labkit.kv_cache.blocks import BlockManager
from labkit.kv_cache.trace import Request, Sample, load_trace, summarize, tables_at
from labkit.labs import _paging_compute
from labkit.labs._paging_compute import PagingCompute
from labkit.labs._paging_result import (
    BLOCK_SIZES,
    MAX_NEW,
    TABLES_AT_S,
    Block,
    PagingParams,
    PagingResult,
    Replay,
    first_blocks,
)
from labkit.labs._result import Progress
from labkit.measure import Label

TRACE = load_trace()
SLOTS = 65_536


def steps(params: PagingParams, trace=None, cancelled=lambda: False) -> list:
    return list(PagingCompute(trace)(params, cancelled))


@functools.cache
def run(block_size: int = 16, max_new: int = 8192, shared_prefix: int = 0) -> PagingResult:
    """The final result of one setting over the whole trace."""
    return steps(PagingParams(block_size, max_new, shared_prefix))[-1]


def with_prompt(count: int) -> list[Request]:
    return [Request(r.arrival_s, r.prompt_tokens + count, r.new_tokens) for r in TRACE]


def same(replay: Replay, summary) -> None:
    for name in ("waste", "peak_running", "preemptions", "finished_s"):
        assert getattr(replay, name) == getattr(summary, name), name


def test_both_replays_come_first_then_the_tables():
    found = steps(PagingParams(16, 8192, 0), TRACE[:20])
    results = [step for step in found if isinstance(step, PagingResult)]
    assert [result.tables is None for result in results] == [True, False]
    assert (results[0].paged, results[0].reserved) == (results[1].paged, results[1].reserved)
    fractions = [step.fraction for step in found if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and 0 < fractions[0] and fractions[-1] < 1
    assert isinstance(found[-1], PagingResult)


@pytest.mark.parametrize(("block_size", "max_new", "prefix"), [(16, 8192, 0), (64, 2048, 256), (256, 1024, 1024)])
def test_both_replays_are_those_of_the_module(block_size, max_new, prefix):
    result, asked = run(block_size, max_new, prefix), with_prompt(prefix)
    blocks = {"block_size": block_size, "num_blocks": SLOTS // block_size, "shared_prefix": prefix}
    same(result.paged, summarize(asked, **blocks))
    reserved = {"policy": "max_new", "max_length": 8192, "max_new": max_new}
    same(result.reserved, summarize(asked, **reserved, block_size=1, num_blocks=SLOTS))
    assert result.tables == tables_at(asked, TABLES_AT_S, **blocks)


def test_the_known_quantities_are_what_they_must_be():
    assert run(1).paged.waste == run(1).formula_waste == 0
    assert run(16).paged.waste < 0.04 < run(256).paged.waste < run(256).reserved.waste
    for size in (16, 64, 256):
        result = run(size)
        assert result.formula_waste == (size - 1) / 2 / result.paged.mean_length
        assert result.paged.waste == pytest.approx(result.formula_waste, rel=0.2)
    assert run(256).reserved.peak_running == SLOTS // 8192


def test_the_more_is_reserved_the_more_is_empty_up_to_all_that_the_model_takes():
    some = TRACE[:60]
    wastes = [steps(PagingParams(16, max_new, 0), some)[-1].reserved.waste for max_new in MAX_NEW]
    assert wastes == sorted(set(wastes))
    assert wastes[-1] == summarize(some, policy="max_length", block_size=1, num_blocks=SLOTS).waste


def test_a_system_prompt_is_reserved_for_each_and_held_in_blocks_once():
    alone, shared = run(16), run(16, 8192, 1024)
    assert shared.reserved.waste < alone.reserved.waste, "the same pieces hold 1,024 tokens more"
    assert shared.reserved.peak_running == alone.reserved.peak_running
    assert shared.paged.mean_length < alone.paged.mean_length + 100
    assert len(shared.tables.shared) == 1024 // 16 and not alone.tables.shared
    count = len(shared.tables.tables)
    assert shared.table_entries == len(shared.tables.used) + (count - 1) * 1024 // 16


def test_a_replay_sums_up_its_samples():
    samples = [
        Sample(0.0, 0, 0, 0, 0, 0),
        Sample(0.1, 6, 8, 1, 2, 0),
        Sample(0.5, 9, 12, 2, 1, 1),
        Sample(0.6, 0, 0, 0, 0, 1),
    ]
    replay = Replay.of(samples)
    assert replay.waste == pytest.approx((2 / 8 + 3 / 12) / 2)
    assert (replay.peak_running, replay.preemptions, replay.finished_s) == (2, 1, 0.6)
    assert replay.mean_length == 15 / 3
    assert replay.samples == (samples[0], samples[2], samples[3])
    nothing = Replay.of(samples[:1])
    assert (nothing.waste, nothing.mean_length, nothing.samples) == (0, 0, (samples[0],))


def test_a_block_says_whose_it_is_and_how_full():
    manager = BlockManager(8, 4)
    first, second = manager.allocate(6), manager.allocate(4)
    gone = manager.allocate(3)
    manager.fork(first)
    manager.free(gone)
    blocks = first_blocks(manager.snapshot(), 5)
    assert blocks == (
        Block(0, (first, 3), 0, 2, 4),
        Block(1, (first, 3), 1, 2, 2),
        Block(2, (second,), 0, 1, 4),
        Block(3, (), 0, 0, 0),
        Block(4, (), 0, 0, 0),
    )
    assert len(first_blocks(manager.snapshot(), 99)) == 8


def test_a_block_that_another_goes_on_from_is_full_where_one_ends():
    manager = BlockManager(8, 4)
    short = manager.allocate(2)
    long = manager.fork(short)
    manager.append(long, 1)  # copies the block
    third = manager.fork(long)
    manager.append(long, 3)
    shared = manager.block_table(third)[0]
    block = first_blocks(manager.snapshot(), 8)[shared]
    assert block.fill == 3 and block.sequences == (third,)
    manager = BlockManager(8, 4)
    one = manager.allocate(4)
    two = manager.fork(one)
    manager.append(two, 3)
    manager.truncate(one, 2)
    assert first_blocks(manager.snapshot(), 1)[0] == Block(0, (one, two), 0, 1, 4)


def test_a_long_replay_is_shown_as_it_grows(monkeypatch):
    trace, params = TRACE[:20], PagingParams(16, 8192, 0)
    whole = steps(params, trace)[-1]
    monkeypatch.setattr(_paging_compute, "_SHOW_EVERY_S", 0.0)
    results = [step for step in steps(params, trace) if isinstance(step, PagingResult)]
    times = [result.paged.finished_s for result in results]
    assert len(times) > 50 and times == sorted(times) and times[0] < 1
    assert all(result.reserved == whole.reserved for result in results)
    assert results[-1] == whole and all(result.tables is None for result in results[:-1])


@pytest.mark.parametrize(("in_paged", "after"), [(False, 0), (False, 10), (True, 10)])
def test_it_stops_at_the_next_moment_when_cancelled(in_paged, after):
    asked, some = [], TRACE[:10]
    if in_paged:  # each sample of the reserved replay asks once, and its end once
        after += round(10 * summarize(some, policy="max_new").finished_s) + 2

    def cancelled() -> bool:
        asked.append(None)
        return len(asked) > after

    found = steps(PagingParams(16, 8192, 0), some, cancelled)
    assert not [step for step in found if isinstance(step, PagingResult)]
    assert any("in blocks" in step.text for step in found) == in_paged
    assert len(asked) == after + 2


@pytest.mark.parametrize("before", [True, False])
def test_nothing_comes_of_tables_when_cancelled_before_or_while_they_are_made(monkeypatch, before):
    made, results = [], []
    monkeypatch.setattr(_paging_compute, "tables_at", lambda *a, **k: made.append(a))
    stop = results if before else made
    for step in PagingCompute(TRACE[:10])(PagingParams(16, 8192, 0), lambda: bool(stop)):
        results += [step] if isinstance(step, PagingResult) else []
    assert len(results) == 1 and len(made) == (not before)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((0, 1024, 0), "block_size"),
        ((48, 1024, 0), "block_size"),
        ((16, 0, 0), "max_new"),
        ((16, 1024, -1), "shared_prefix"),
        ((16, 1024, 0, 8192, 65_536, 0.0), "tokens_per_second"),
    ],
)
def test_bad_parameters_are_named(values, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
        PagingParams(*values)


def test_every_block_size_divides_the_memory_and_every_reservation_takes_the_trace():
    assert all(SLOTS % size == 0 for size in BLOCK_SIZES)
    longest = max(r.prompt_tokens + r.new_tokens for r in TRACE) + 1024
    assert longest <= 8192 and max(r.new_tokens for r in TRACE) <= min(MAX_NEW)
    with pytest.raises(ValueError, match="^max_new: got 500; takes at least "):
        steps(PagingParams(16, 500, 0))


def test_numbers_are_what_the_replays_say():
    result = run(16, 2048, 0)
    exact = {number.key: number.exact for number in result.numbers()}
    assert exact["waste"] == result.paged.waste and exact["reserved_waste"] == result.reserved.waste
    assert exact["formula_waste"] == 7.5 / result.paged.mean_length
    assert exact["more_at_once"] == result.paged.peak_running / result.reserved.peak_running > 2
    assert exact["table_entries"] == sum(len(table) for table in result.tables.tables.values())
    assert (exact["preemptions"], exact["peak_running"]) == (result.paged.preemptions, result.paged.peak_running)
    groups = {number.group for number in result.numbers()}
    assert groups == {"Paged: blocks of 16, no system prompt", "Reserved: prompt + 2,048 slots a request"}
    early = {number.key for number in dataclasses.replace(result, tables=None).numbers()}
    assert early == exact.keys() - {"table_entries"}


def test_text_holds_the_numbers_both_replays_and_tables():
    result = run(16, 8192, 1024)
    text = result.text()
    for number in result.numbers():
        assert number.text in text and number.label in text
    assert "all 8,192" in text and "system prompt of 1,024" in text and "MODELLED" in text
    assert len([line for line in text.splitlines() if line.startswith("  sequence ") and " 0* 1* 2* " in line]) == 4
    at = {sample.time_s: sample for sample in result.reserved.samples}[60.0]
    line = next(line for line in text.splitlines() if line.split()[:2] == ["60", "s"])
    assert line.split()[-2:] == [str(at.running), str(at.waiting)]


def test_measurements_and_rows_carry_parameters_and_labels():
    result = run(64, 2048, 256)
    lines = {line.name.removeprefix("paging_lab."): line for line in result.measurements()}
    params = {"block_size": 64, "max_new": 2048, "shared_prefix": 256}
    params |= {"max_length": 8192, "slots": SLOTS, "tokens_per_second": 20.0}
    assert all(line.params == params for line in lines.values())
    modelled = {name for name, line in lines.items() if line.label is Label.MODELLED}
    assert modelled == {"formula_waste", "finished_s", "reserved_finished_s"}
    assert {line.label for line in lines.values()} == {Label.MODELLED, Label.MEASURED}
    exact = {number.key: number.exact for number in result.numbers()}
    for name in exact.keys() & lines.keys():
        assert lines[name].value == exact[name]
    assert lines.keys() == exact.keys() - {"more_at_once"} | {"mean_length"}
    rows = result.rows()
    assert [row["quantity"] for row in rows] == list(lines)
    assert all(row["block_size"] == 64 and math.isfinite(row["value"]) for row in rows)
    assert {row["quantity"] for row in rows if row["label"] == "MODELLED"} == modelled
