"""The recorder of quantization-aware training writes what the study found, with the machine it ran on."""

import json

from labkit.quantization import QATConfig
from labkit.quantization.qat_study import VARIANTS, recorded_study
from tools import record_qat


def test_it_records_the_default_and_every_variant_with_the_machine(monkeypatch, tmp_path):
    path, asked = tmp_path / "recorded" / "qat.json", {}

    def study(**options):
        asked.update(options)
        return recorded_study()

    monkeypatch.setattr(record_qat, "RECORDED", path)
    monkeypatch.setattr(record_qat, "qat_study", study)
    monkeypatch.setattr(record_qat.torch, "set_num_threads", lambda count: asked.update(threads=count))
    assert record_qat.main(["--steps", "3"]) == 0
    assert asked["config"] == QATConfig(steps=3) and asked["variants"] is VARIANTS
    assert asked["threads"] == record_qat.describe("cpu").cores
    kept = json.loads(path.read_text())
    assert {"machine", "date", "commit"} == set(kept["provenance"])
    assert kept["perplexity"] == recorded_study().perplexity
