"""What was recorded of caches is read with its machine, and reaches what the course promises."""

import dataclasses
import json

import pytest

from labkit.kv_cache.recorded import RECORDED, evicted_table, generation_table, quantized_table, recorded_kv
from labkit.measure import Label
from tools.record_kv_cache import PARTS


def test_it_names_its_machine_date_and_commit():
    found = recorded_kv()
    assert found.machine and found.commit and found.date.count("-") == 2
    measured = found.measurement("ratio", 2.0, "ratio", new_tokens=64)
    assert measured.label is Label.RECORDED and measured.device == found.machine and measured.params["new_tokens"] == 64


def test_every_part_was_recorded():
    found = recorded_kv()
    assert all(getattr(found, part) for part in PARTS)


def test_no_setting_stands_twice():
    rows = json.loads(RECORDED.read_text(encoding="utf-8"))["quantized"]
    keys = [(row["cache"], row["nbits"], row["q_group_size"], row["residual_length"]) for row in rows]
    assert len(keys) == len(set(keys))


def test_a_setting_that_was_not_recorded_is_refused():
    with pytest.raises(LookupError, match="no recorded run"):
        recorded_kv().one("labkit", 3)


def test_the_cache_pays_more_the_longer_the_text():
    ratios = [run.ratio for run in recorded_kv().generation]
    assert ratios == sorted(ratios) and recorded_kv().generation[-1].new_tokens == 256


@pytest.mark.parametrize(("nbits", "most"), [(8, 0.001), (4, 0.025)])
def test_quantized_caches_lose_what_the_course_allows(nbits, most):
    run = recorded_kv().one("labkit", nbits)
    assert run.q_group_size == 32 and abs(run.loss) < most


def test_four_bits_take_a_third_of_the_bytes():
    assert recorded_kv().one("labkit", 4).share <= 0.34


def test_the_tables_say_what_the_rows_hold():
    found = recorded_kv()
    run = dataclasses.replace(found.one("labkit", 4), perplexity=11.0, baseline=10.0, nbytes=3, full_bytes=10)
    (row,) = quantized_table(dataclasses.replace(found, quantized=(run,))).rows
    assert row == ("labkit", "4", "32", "32", "11.000", "+10.00%", "0.300")
    first = dataclasses.replace(found.generation[0], new_tokens=8, with_cache_s=1.0, without_cache_s=2.5)
    (row,) = generation_table(dataclasses.replace(found, generation=(first,))).rows
    assert row == ("8", "1.00 s", "2.50 s", "2.5x")


def test_snapkv_beats_a_window_of_its_size_on_the_needle_and_on_what_follows_a_prompt():
    """At a quarter of the tokens."""
    found = recorded_kv()
    window, snapkv = (found.kept_by(method, 0.25) for method in ("window", "snapkv"))
    assert snapkv.hidden == window.hidden >= 30 and snapkv.found > 2 * window.found
    window, snapkv = (found.kept_by(method, 0.25, prompt_length=896) for method in ("window", "snapkv"))
    assert snapkv.perplexity < 0.8 * window.perplexity


def test_heavy_hitters_beat_a_window_of_their_size_on_perplexity():
    found = recorded_kv()
    assert found.kept_by("heavy_hitters", 0.25).perplexity < 0.8 * found.kept_by("window", 0.25).perplexity


def test_sinks_hold_over_four_times_the_window_where_a_window_alone_breaks():
    found = recorded_kv()
    full, sinks, window = (
        found.kept_by(method, budget).perplexity
        for method, budget in (("full", 1.0), ("sinks", 0.25), ("window", 0.25))
    )
    assert sinks < 1.1 * full and window > 1.5 * full


def test_the_full_cache_finds_nine_of_ten_needles_up_to_512_tokens():
    full = [run for run in recorded_kv().evicted if run.method == "full" and run.hidden]
    assert {run.needle_length for run in full} == {256, 512}
    assert all(run.found >= 0.9 * run.hidden for run in full)


def test_what_was_not_recorded_of_eviction_is_refused():
    with pytest.raises(LookupError, match="no recorded run"):
        recorded_kv().kept_by("sinks", 0.3)


def test_the_table_of_evictions_has_a_row_a_run():
    found = recorded_kv()
    assert len(evicted_table(found).rows) == len(found.evicted)
