"""`make record` names each setting once, and goes on from what is recorded."""

import json

from tools import record_quantization
from tools.record_quantization import settings


def keys() -> list[tuple[object, ...]]:
    return [tuple(s.get(key) for key in ("method", "bits", "group_size", "plan")) for s in settings()]


def test_no_setting_comes_twice_and_the_chapters_tables_come_first():
    found = keys()
    assert len(found) == len(set(found))
    assert {(m, b, 64, None) for m in ("RTN", "GPTQ", "AWQ") for b in (2, 3, 4, 8)} < set(found[:15])


def test_what_is_recorded_is_not_run_again(monkeypatch, tmp_path):
    path = tmp_path / "quantization.json"
    known = [s | {"perplexity": 1.0} for s in settings()][:-1]
    path.write_text(json.dumps({"common": {}, "runs": known}))
    monkeypatch.setattr(record_quantization, "RECORDED", path)
    ran = []

    class Recorder(record_quantization.Recorder):
        def __init__(self):
            self.runs = json.loads(path.read_text())["runs"]

        def run(self, setting):
            ran.append(setting)
            return setting

        def write(self):
            pass

    monkeypatch.setattr(record_quantization, "Recorder", Recorder)
    assert record_quantization.main([]) == 0
    assert ran == [list(settings())[-1]]
