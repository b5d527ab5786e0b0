"""The study of merged heads on a tiny model, its record, and the tool that makes it."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from labkit.attention import merge_study, recorded_merge_study, study
from labkit.models import LoadedModel, shared_copy, tiny_model
from labkit.quality import perplexity
from tools import record_kv_merge


class Bytes:
    """A tokenizer whose ids are bytes."""

    def __call__(self, text: str, return_tensors: str | None = None, **_):
        ids = list(text.encode())
        return SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors else ids)


@pytest.fixture
def tiny(monkeypatch) -> LoadedModel:
    loaded = LoadedModel(tiny_model(num_key_value_heads=4), Bytes(), "tiny")
    texts = {"calibration": "some words to calibrate on, again and again. " * 20, "eval": "other words to score. " * 20}
    monkeypatch.setattr(study, "load_model", lambda *_, **__: loaded)
    monkeypatch.setattr(study, "load_text", lambda name, split: texts[split])
    return loaded


SMALL = {"n_samples": 3, "seq_len": 24, "fit_steps": 20, "eval_windows": 4, "other_windows": 2, "n_points": 3}
SMALL |= {"heal_samples": 4, "heal_steps": 6, "progress": False, "learning_rate": 1e-3}


def test_the_study_measures_each_way_on_a_model_of_its_own(tiny: LoadedModel, tmp_path) -> None:
    weights = {name: weight.clone() for name, weight in tiny.model.state_dict().items()}
    found = merge_study("tiny", 1, **SMALL)
    assert all(torch.equal(weight, weights[name]) for name, weight in tiny.model.state_dict().items())
    names = [(r.method, r.merge) for r in found.results]
    apart = [(method, merge) for method in ("mean", "calibrated") for merge in ("both", "keys", "values")]
    assert names == [*apart, ("fitted", "both"), ("mean, healed", "both"), ("calibrated, healed", "both")]
    windows = torch.tensor(list(b"other words to score. " * 20))[: 4 * 24]
    assert found.baseline == pytest.approx(perplexity(tiny, windows, 24), rel=1e-5)
    mean = shared_copy(tiny.model)
    study.merge_kv_heads_(mean, 1)
    assert found.result("mean").perplexity == pytest.approx(perplexity(mean, windows, 24), rel=1e-4)
    for result in found.results:
        assert result.loss_rise == pytest.approx(math.log(result.perplexity / found.baseline), abs=1e-4)
        assert result.bytes_per_token == (2 * 2 * 16 * 4 if result.merge == "both" else found.bytes_per_token_before)
    for healing, start in zip(found.healings, ("mean", "calibrated"), strict=True):
        assert [point.step for point in healing.points] == [0, 3, 6] and len(healing.losses) == 6
        # The distance to the original, on other samples of as plain a text; the text's own loss is above 4.
        assert healing.losses[0] == pytest.approx(found.result(start).kl, rel=0.6)
        assert healing.points[0].loss is None and healing.points[-1].loss == healing.losses[-1]
        assert healing.points[0].perplexity == pytest.approx(found.result(start).perplexity, rel=1e-4)
        assert healing.points[-1].perplexity == pytest.approx(found.result(f"{start}, healed").perplexity, rel=1e-4)
    found.save(tmp_path / "kept.json", machine="a machine", date="a date", commit="abc")
    again = recorded_merge_study(tmp_path / "kept.json")
    assert again.results == found.results and again.healings == found.healings
    assert again.measurement("mean").device == "a machine" and again.measurement("mean").label == "RECORDED"
    assert len(again.table().rows) == 9 and len(again.apart_table().rows) == 2
    with pytest.raises(KeyError):
        again.result("fitted", "keys")


def test_a_time_limit_still_ends_with_a_point(tiny: LoadedModel) -> None:
    found = merge_study("tiny", 2, **(SMALL | {"heal_time_limit_s": 0.0, "heal_from": ("mean",)}))
    assert [point.step for point in found.healings[0].points] == [0]
    with pytest.raises(ValueError, match="heal_from: got 'median'"):
        merge_study("tiny", 2, heal_from=("median",))
    with pytest.raises(ValueError, match="eval_windows: got 1000"):
        merge_study("tiny", 2, **(SMALL | {"eval_windows": 1000}))


def test_the_tool_records_with_the_machine(monkeypatch, tmp_path, capsys, tiny: LoadedModel) -> None:
    path, asked = tmp_path / "recorded" / "kv_merge.json", {}

    def small(**options):
        asked.update(options)
        return merge_study("tiny", 1, **SMALL)

    monkeypatch.setattr(record_kv_merge, "RECORDED", path)
    monkeypatch.setattr(record_kv_merge, "merge_study", small)
    monkeypatch.setattr(record_kv_merge.torch, "set_num_threads", lambda count: asked.update(threads=count))
    assert record_kv_merge.main(["--heal-steps", "3"]) == 0
    assert asked == {"heal_steps": 3, "threads": record_kv_merge.describe("cpu").cores}
    kept = json.loads(path.read_text())
    assert {"machine", "date", "commit"} == set(kept["provenance"])
    assert "calibrated, healed" in capsys.readouterr().out


def test_the_recorded_run_reaches_what_the_course_promises() -> None:
    """At most half of mean pooling's loss in nats, keys and values apart; healing brings back a part of the mean's."""
    found = recorded_merge_study()
    assert found.num_key_value_heads_before == 3 and found.num_key_value_heads == 1
    mean = found.result("mean").loss_rise
    for method in ("calibrated", "fitted"):
        assert found.result(method).loss_rise <= 0.5 * mean
        assert found.result(method).bytes_per_token * 3 == found.bytes_per_token_before
    for part in ("keys", "values"):
        assert found.result("calibrated", part).loss_rise < found.result("mean", part).loss_rise
    assert found.result("mean, healed").loss_rise < mean
    assert found.result("calibrated, healed").loss_rise < found.result("calibrated").loss_rise
    assert found.provenance["machine"] and found.provenance["commit"]
