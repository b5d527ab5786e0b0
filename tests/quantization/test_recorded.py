"""Recorded runs are read with their machine, labelled as recorded, and never stand for one that was not made."""

import json

import pytest

from labkit.measure import Label
from labkit.quantization.recorded import RECORDED, recorded_run, recorded_runs, recorded_sensitivity, runs_table


def test_every_run_names_its_machine_date_and_commit():
    runs = recorded_runs()
    assert runs
    for run in runs:
        measured = run.measurement()
        assert measured.label is Label.RECORDED and measured.device and measured.params["commit"]
        assert (
            run.date.count("-") == 2 and run.perplexity >= 0.9 * run.baseline and run.bits_per_weight > run.bits * 0.5
        )


def test_a_setting_that_was_not_recorded_is_none():
    assert recorded_run("GPTQ", 4, 64).method == "GPTQ"
    assert recorded_run("GPTQ", 4, 77) is None


def test_no_file_is_no_runs(tmp_path):
    assert recorded_runs(tmp_path / "none.json") == ()


def test_the_table_says_what_each_run_lost():
    run = recorded_run("GPTQ", 4, 64)
    (row,) = runs_table([run]).rows
    assert row[0] == "GPTQ" and row[1] == "4" and row[5] == f"{run.perplexity / run.baseline - 1:+.1%}"


def test_sensitivity_has_a_value_for_every_matrix_of_the_default_model():
    found = recorded_sensitivity()
    kinds = found.by_kind()
    assert {len(values) for values in kinds.values()} == {30} and len(kinds) == 7
    assert found.by_name["model.layers.29.mlp.down_proj"] == kinds["down_proj"][29] > 0


def test_the_file_holds_no_setting_twice():
    runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
    keys = [(run["method"], run["bits"], run["group_size"], run.get("plan")) for run in runs]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("method", "bits", "least"), [("GPTQ", 4, 0.55), ("AWQ", 4, 0.35), ("GPTQ", 3, 0.70)])
def test_the_recorded_methods_close_what_the_course_promises(method, bits, least):
    rtn, better = recorded_run("RTN", bits, 64), recorded_run(method, bits, 64)
    assert (rtn.perplexity - better.perplexity) / (rtn.perplexity - rtn.baseline) >= least


def test_eight_bits_lose_under_half_a_percent():
    for method in ("RTN", "GPTQ", "AWQ"):
        run = recorded_run(method, 8, 64)
        assert run.perplexity / run.baseline - 1 < 0.005


def test_the_setting_that_the_chapter_ends_on_is_within_8_percent_at_a_third_of_the_bytes():
    run = recorded_run("AWQ", 4, 64, plan="0.35 of 16 bits")
    assert run.perplexity / run.baseline - 1 <= 0.08 and run.bits_per_weight <= 0.35 * 16


def test_gptq_took_under_four_minutes():
    assert recorded_run("GPTQ", 4, 64).seconds < 240
