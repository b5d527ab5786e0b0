"""The table of libraries: what is recorded, what is not installed, and the figures that this package promises."""

import dataclasses
import json

import pytest

from labkit.quantization._peer_environments import OURS, PEERS
from labkit.quantization._peer_records import RecordedPeer, peers_table, recorded_peers

RUN = RecordedPeer(
    **{"peer": "gptqmodel", "method": "GPTQ", "bits": 4, "group_size": 64, "sym": False, "desc_act": True},
    **{"damp_percent": 0.01, "dtype": "float32", "perplexity": 16.5, "baseline": 14.57, "seconds": 180.0},
    **{"nbytes": 58_000_000, "threads": 2, "device": "cpu", "model": "smollm2-135m"},
    **{"versions": {"gptqmodel": "7.6.0", "torch": "2.13.0"}, "notes": ("a note",)},
    **{"machine": "AMD EPYC, 2 of 2 cores, torch 2.13.0", "date": "2026-11-30", "commit": "abc"},
    **{"calibration": "32 x 512", "evaluation": "6 x 512"},
)


@pytest.fixture
def nothing_installed(monkeypatch, tmp_path):
    for name in ("LABKIT_QUANTLIBS", "LABKIT_LEGACY"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


def rows(table):
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_table_has_every_library_and_says_how_to_get_what_is_missing(nothing_installed):
    found = rows(peers_table(recorded=[RUN]))
    assert [row["library"] for row in found] == ["labkit", "GPTQModel 7.6.0", "AutoGPTQ", "AutoAWQ"]
    row = found[1]
    assert row["here"] == "GPTQModel is not installed (no none): make quantlibs installs it"
    assert (row["perplexity"], row["float"], row["time"], row["bytes"]) == ("16.50", "14.57", "180 s", "58 MB")
    assert row["settings"] == "smollm2-135m, 4 bits, g64, asymmetric, act-order, float32"
    assert row["where"] == "RECORDED 2026-11-30, AMD EPYC, 2 of 2 cores, commit abc; a note"
    assert found[0]["here"] == "installed"
    assert found[2]["maintained"].startswith("no") and row["maintained"] == "yes"
    assert found[2]["perplexity"] == "" and found[2]["where"] == "not recorded" and "quantlibs" in found[2]["here"]


def test_what_was_measured_now_stands_below_what_is_recorded():
    kept = {field.name: getattr(RUN, field.name) for field in dataclasses.fields(RecordedPeer.__base__)}
    live = RecordedPeer.__base__(**kept | {"perplexity": 17.0, "notes": ()})
    found = [row for row in rows(peers_table([live], recorded=[RUN])) if row["library"].startswith("GPTQModel")]
    assert [(row["perplexity"], row["where"]) for row in found][1] == ("17.00", "MEASURED here")
    assert found[0]["where"].startswith("RECORDED")


def test_recorded_runs_are_read_with_what_they_have_in_common(tmp_path):
    path = tmp_path / "peers.json"
    assert recorded_peers(path) == ()
    run = dataclasses.asdict(RUN)
    common = {name: run.pop(name) for name in ("model", "calibration", "evaluation")}
    path.write_text(json.dumps({"common": common, "runs": [run]}))
    recorded_peers.cache_clear()
    assert recorded_peers(path) == (RUN,)


def recorded(peer, method):
    return next(run for run in recorded_peers() if (run.peer, run.method) == (peer, method))


@pytest.mark.parametrize("method", ["GPTQ", "AWQ"])
def test_perplexity_is_within_two_percent_of_gptqmodels_or_better(method):
    ours, theirs = recorded("labkit", method), recorded("gptqmodel", method)
    same = ("bits", "group_size", "sym", "desc_act", "damp_percent", "model", "calibration", "evaluation", "threads")
    assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
    assert ours.perplexity <= 1.02 * theirs.perplexity
    assert ours.baseline == theirs.baseline and ours.nbytes <= 1.02 * theirs.nbytes


def test_gptq_takes_at_most_1_3_of_gptqmodels_time():
    ours, theirs = recorded("labkit", "GPTQ"), recorded("gptqmodel", "GPTQ")
    assert (ours.machine, ours.date, ours.commit) == (theirs.machine, theirs.date, theirs.commit)
    assert ours.seconds <= 1.3 * theirs.seconds


def test_every_library_is_recorded_with_its_version_and_machine():
    assert {run.peer for run in recorded_peers()} == {OURS.name, *(peer.name for peer in PEERS)}
    assert all(run.version and run.machine and run.date and run.commit for run in recorded_peers())
