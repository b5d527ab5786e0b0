"""`make record-peers` names each run once, goes on from what is recorded, and leaves out what is not installed."""

import json

import pytest

from tools import record_peers
from tools.record_peers import settings

KEYS = record_peers._KEYS


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """A recorder whose runs take no time; it writes to a file of the test's own, which holds all runs but one."""
    path = tmp_path / "peers.json"
    known = [setting | {"perplexity": 1.0} for setting in settings() if setting["peer"] != "gptqmodel"]
    path.write_text(json.dumps({"common": {}, "runs": known}))
    monkeypatch.setattr(record_peers, "RECORDED", path)
    monkeypatch.setattr(record_peers, "missing", lambda peer: None)
    ran = []

    def run(self, setting):
        ran.append(setting)
        return setting | {"perplexity": 2.0}

    monkeypatch.setattr(record_peers.Recorder, "run", run)
    return path, ran


def test_no_run_comes_twice_and_this_package_comes_first():
    found = [tuple(setting[key] for key in KEYS) for setting in settings()]
    assert len(found) == len(set(found))
    for method in ("GPTQ", "AWQ"):
        assert next(s for s in settings() if s["method"] == method)["peer"] == "labkit"


def test_what_is_recorded_is_not_run_again_and_the_file_keeps_one_order(recorder):
    path, ran = recorder
    assert record_peers.main([]) == 0
    assert [(s["peer"], s["method"]) for s in ran] == [("gptqmodel", "GPTQ"), ("gptqmodel", "AWQ")]
    runs = json.loads(path.read_text())["runs"]
    assert [[run[key] for key in KEYS] for run in runs] == [[s[key] for key in KEYS] for s in settings()]
    assert [run["perplexity"] for run in runs if run["peer"] == "gptqmodel"] == [2.0, 2.0]


def test_again_replaces_one_librarys_run(recorder):
    path, ran = recorder
    assert record_peers.main(["--again", "--peer", "labkit", "--method", "AWQ"]) == 0
    assert [(s["peer"], s["method"]) for s in ran] == [("labkit", "AWQ")]
    runs = json.loads(path.read_text())["runs"]
    assert [run["perplexity"] for run in runs if run["peer"] == "labkit"] == [1.0, 2.0]


def test_what_is_not_installed_is_left_out_and_said(recorder, monkeypatch, capsys):
    monkeypatch.setattr(record_peers, "missing", lambda peer: "no such library" if peer == "gptqmodel" else None)
    assert record_peers.main([]) == 0
    assert recorder[1] == []
    assert "left out: no such library" in capsys.readouterr().err
