import dataclasses

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache import QuantizedCache
from labkit.kv_cache.evaluation import cached_perplexity
from labkit.labs import _kv_cache_compute
from labkit.labs._kv_cache_compute import KVCacheCompute
from labkit.labs._kv_cache_result import BITS, KVCacheResult
from labkit.labs._quantization_text import prepare
from labkit.measure import Label
from tests.labs.kv_cache_fixtures import OWN, STUDY, loaded, params, run

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("fixed_kv_cache")


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def compute(model) -> KVCacheCompute:
    return KVCacheCompute(model, CPU)


@pytest.mark.parametrize("bits", BITS)
def test_perplexity_is_that_of_the_model_through_the_cache(compute, model, bits):
    quality = run(compute, 256, OWN, bits)[-1].quality
    window = prepare(model, None).evaluation[:512]
    config = model.model.config

    def make():
        return DynamicCache(config=config) if bits == 16 else QuantizedCache(config, bits, 32, 32)

    assert quality.perplexity == pytest.approx(cached_perplexity(model, window, 512, make), rel=1e-6)
    full = cached_perplexity(model, window, 512, lambda: DynamicCache(config=config))
    assert quality.baseline == pytest.approx(full, rel=1e-6)
    assert (quality.perplexity == quality.baseline) == (bits == 16)
    assert (quality.scored, quality.of) == (511, 511)


def test_the_perplexity_of_a_number_of_bits_is_measured_once(compute, monkeypatch):
    calls = []
    real = _kv_cache_compute.cached_perplexity_stream
    monkeypatch.setattr(
        _kv_cache_compute, "cached_perplexity_stream", lambda *args, **kw: calls.append(1) or real(*args, **kw)
    )
    four = run(compute, 256, OWN, 4)[-1].quality
    assert len(calls) == 2, "this one, and that in full precision beside it"
    again = run(compute, 512, OWN, 4)
    assert len(calls) == 2 and again[-1].quality == four and len(again) == 3
    run(compute, 512, OWN, 2)
    assert len(calls) == 3 and run(compute, 256, OWN, 16)[-1].quality.perplexity == four.baseline
    assert len(calls) == 3


def test_other_heads_have_no_perplexity_but_what_was_recorded(compute, monkeypatch):
    def last(heads: int) -> tuple:
        result = run(compute, 256, heads, 4)[-1]
        return result, [n for n in result.numbers() if n.group.startswith("Quality")]

    result, (number,) = last(1)
    assert result.quality is None and result.merged is None
    assert (number.text, number.note) == ("not recorded", "merging 2 heads to 1: no run is kept")
    monkeypatch.setattr(_kv_cache_compute, "recorded_merge_study", lambda: STUDY)
    result, shown = last(1)
    assert result.quality is None and [(n.exact, n.label) for n in shown] == [
        (5000.0, "merged, mean"),
        (40.0, "merged, fitted"),
    ]
    assert all(n.note == "from 10.0; RECORDED 2026-11-30" for n in shown)
    lines = [m for m in result.measurements() if m.name == "kv_cache_lab.merged_perplexity"]
    assert [(m.value, m.label, m.device, m.params["method"]) for m in lines] == [
        (5000.0, Label.RECORDED, "a machine", "mean"),
        (40.0, Label.RECORDED, "a machine", "fitted"),
    ]
    assert all(m.params["commit"] == "abc" and m.params["num_key_value_heads"] == 1 for m in lines)
    result, (number,) = last(4)
    assert result.merged is None and number.text == "not recorded" and "trained with fewer" in number.note
    monkeypatch.setattr(_kv_cache_compute, "recorded_merge_study", lambda: dataclasses.replace(STUDY, model="another"))
    result, (number,) = last(1)
    assert result.merged is None and number.note == "merging 2 heads to 1: for tiny with 1 KV heads"


@pytest.mark.parametrize("results_before", [0, 1, 2, 4])
def test_it_stops_when_cancelled(compute, results_before):
    results = []
    for step in compute(params(bits=4), lambda: len(results) >= results_before):
        if isinstance(step, KVCacheResult):
            results.append(step)
    assert len(results) == results_before
    assert not compute._qualities, "a perplexity of a part is not kept as the whole"
    assert run(compute, bits=4)[-1].quality.firm


def test_it_stops_between_a_chunk_and_the_same_in_full_precision(compute, monkeypatch):
    chunks = []
    real = _kv_cache_compute.cached_perplexity_stream

    def counted(*args, **kwargs):
        for step in real(*args, **kwargs):
            chunks.append(step)
            yield step

    monkeypatch.setattr(_kv_cache_compute, "cached_perplexity_stream", counted)
    steps = list(compute(params(bits=4), lambda: len(chunks) >= 1))
    assert len(chunks) == 1 and all(s.quality is None for s in steps if isinstance(s, KVCacheResult))


def test_a_failed_perplexity_starts_again(compute, monkeypatch):
    real = _kv_cache_compute.cached_perplexity_stream

    def broken(*args, **kwargs):
        yield next(real(*args, **kwargs))
        raise RuntimeError("no memory")

    monkeypatch.setattr(_kv_cache_compute, "cached_perplexity_stream", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        run(compute)
    monkeypatch.setattr(_kv_cache_compute, "cached_perplexity_stream", real)
    assert run(compute)[-1].quality.firm
