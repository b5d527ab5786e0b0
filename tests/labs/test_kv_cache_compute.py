import dataclasses
import math
import re

import pytest
import torch

from labkit.hardware import describe
from labkit.kv_cache import bytes_per_token, quantized_cache_bytes
from labkit.labs import _kv_cache_compute, _kv_cache_steps
from labkit.labs._kv_cache_compute import KVCacheCompute
from labkit.labs._kv_cache_result import BITS, SEQ_LENS, KVCacheParams, KVCacheResult
from labkit.labs._kv_cache_steps import config_with, measure_attention
from labkit.labs._result import Progress
from labkit.measure import Label
from labkit.sizing import weight_bytes
from tests.labs.kv_cache_fixtures import HEAD_DIM, LAYERS, OWN, Spy, by_hand, loaded, params, run
from tests.labs.roofline_fixtures import CEILINGS

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("fixed_kv_cache")


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def compute(model) -> KVCacheCompute:
    return KVCacheCompute(model, CPU)


def first(compute: KVCacheCompute, *args: object) -> KVCacheResult:
    """What is known once the cache stands."""
    return next(step for step in compute(params(*args), lambda: False) if isinstance(step, KVCacheResult))


def test_bytes_come_first_then_time_then_perplexity(compute):
    steps = list(compute(params(bits=4), lambda: False))
    results = [step for step in steps if isinstance(step, KVCacheResult)]
    assert [(r.speed is None, r.quality is None) for r in results[:3]] == [(True, True), (False, True), (False, False)]
    scored = [r.quality.scored for r in results[2:]]
    assert scored == [*range(32, 511, 32), 511] and results[-1].quality.firm and not results[-2].quality.firm
    assert all(r.sizes == results[0].sizes for r in results) and all(r.speed == results[1].speed for r in results[1:])
    fractions = [step.fraction for step in steps if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and 0 < fractions[0] and fractions[-1] < 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("seq_len", [256, 1024])
def test_what_is_allocated_is_what_the_formulas_say(compute, model, seq_len, heads, bits):
    sizes = first(compute, seq_len, heads, bits).sizes
    assert sizes.allocated == sizes.predicted == by_hand(seq_len, heads, bits)
    assert sizes.layers_allocated == sizes.num_layers == LAYERS
    assert sizes.full == by_hand(seq_len, heads, 16) and sizes.own == by_hand(seq_len, OWN, 16)
    assert sizes.smaller == by_hand(seq_len, OWN, 16) / by_hand(seq_len, heads, bits)
    assert sizes.weights == weight_bytes(model.model.config, "bfloat16")
    assert sizes.curves == {b: {n: by_hand(n, heads, b) for n in SEQ_LENS} for b in BITS}
    config = config_with(model.model.config, heads)
    public = quantized_cache_bytes(config, 1, seq_len, "bfloat16", nbits=bits) if bits < 16 else None
    assert sizes.predicted == (public or seq_len * bytes_per_token(config, torch.bfloat16))


def test_tokens_past_what_the_model_was_made_for_are_said_to_be(compute):
    notes = [{n.key: n.note for n in first(compute, length, OWN, 4).numbers()} for length in (512, 1024)]
    assert notes[0]["token_bytes"] == "64 recent tokens in 16 bits"
    assert notes[1]["token_bytes"] == "64 recent tokens in 16 bits; the model knows 512 positions"


def test_the_model_keeps_its_own_config(compute, model):
    first(compute, 256, 1, 4)
    assert (model.model.config.num_key_value_heads, model.model.config.num_hidden_layers) == (OWN, LAYERS)


@pytest.mark.parametrize("bits", [16, 4])
def test_of_a_cache_that_would_take_long_or_much_one_layer_says_it_for_all(model, monkeypatch, bits):
    whole = first(KVCacheCompute(model, CPU), 256, 2, bits)
    # With little memory a quarter of it is less than a 16-bit cache of this model, while five of its layers fit.
    little = KVCacheCompute(model, CPU, free_bytes=lambda: 4 * whole.sizes.total - 4)
    ones = [first(little, 256, 2, bits)] if bits == 16 else []
    monkeypatch.setitem(_kv_cache_steps._MOST_BYTES, "cpu", whole.sizes.total - 1)
    for found in (*ones, first(KVCacheCompute(model, CPU), 256, 2, bits)):
        assert found.sizes.layers_allocated == 1 and found.sizes.allocated == whole.sizes.total // LAYERS
        assert found.sizes.total == whole.sizes.total == found.sizes.predicted
        (line,) = (m for m in found.measurements() if m.name == "kv_cache_lab.cache_bytes")
        assert line.label is Label.MODELLED
        note = next(n.note for n in found.numbers() if n.key == "cache_bytes")
        assert note == "2 x the one layer MEASURED"


def test_what_does_not_fit_is_refused_before_allocating_with_a_length_that_fits(model, monkeypatch):
    # Five times a layer in 16 bits, with a tenth of the memory left alone: room for 1,024 tokens.
    free = int(5 * 1024 * 4 * HEAD_DIM * 2 * 2 / 0.9) + 1
    compute = KVCacheCompute(model, CPU, free_bytes=lambda: free)
    with monkeypatch.context() as patch:
        patch.setattr(_kv_cache_compute, "hold", lambda *_: pytest.fail("allocated"))
        message = r"seq_len: got 4096 with 4 KV heads, .* needs 10.5 MB where 2.91 MB are free; takes at most (\d+)$"
        with pytest.raises(ValueError, match=message) as refused:
            first(compute, 4096, 4, 16)
    fits = int(re.search(r"at most (\d+)", str(refused.value))[1])
    assert fits == 1024 and first(compute, fits, 4, 16).params.seq_len == fits
    with pytest.raises(ValueError, match="takes at most 1024"):
        first(compute, 2 * fits, 4, 16)
    nothing = KVCacheCompute(model, CPU, free_bytes=lambda: 1000)
    with pytest.raises(ValueError, match="takes fewer KV heads"):
        first(nothing, 256, 4, 16)


def test_timing_goes_round_more_than_four_times_the_last_cache_where_that_fits(model, monkeypatch):
    monkeypatch.setattr(_kv_cache_compute, "_COLD", 4)
    asked = []

    def measure(*arguments):
        asked.append(arguments[-1])
        return measure_attention(*arguments[:-1], 0)

    monkeypatch.setattr(_kv_cache_compute, "measure_attention", measure)
    cache = describe(CPU).cache_bytes or 2**25
    run(KVCacheCompute(model, CPU, free_bytes=lambda: 100 * cache), 256, 1)
    run(KVCacheCompute(model, CPU, free_bytes=lambda: 4 * cache), 256, 1)
    assert asked == [4 * cache + 1, cache]


def test_time_stands_beside_the_least_that_the_bandwidth_allows(compute, monkeypatch):
    monkeypatch.setattr(_kv_cache_steps, "compare_ops", Spy(1))
    result = run(compute, 256, 2, 4)[-1]
    speed, exact = result.speed, {n.key: n for n in result.numbers()}
    assert speed.floor_s == pytest.approx(by_hand(256, 2, 4) / LAYERS / CEILINGS.read_bandwidth)
    assert (exact["attention_s"].exact, exact["full_s"].exact) == (3.0, 2.0)
    assert exact["floor_share"].exact == pytest.approx(speed.floor_s / 3.0)
    assert (exact["speedup"].exact, exact["speedup"].text) == (pytest.approx(2 / 3), "1.5x slower")
    faster = dataclasses.replace(speed, timing=dataclasses.replace(speed.timing, median=0.5))
    text = {n.key: n.text for n in dataclasses.replace(result, speed=faster).numbers()}
    assert text["speedup"] == "4x faster"
    assert speed.backend == "torch"


def test_a_bandwidth_that_attention_beats_is_measured_again_and_only_raised(compute, monkeypatch):
    refreshed = []

    def measure(device, refresh=False):
        refreshed.append(refresh)
        return dataclasses.replace(CEILINGS, read_bandwidth=(2e3 if refresh else 1e3) / len(refreshed))

    monkeypatch.setattr(_kv_cache_compute, "measure_ceilings", measure)
    assert run(compute)[-1].speed.bandwidth == 1e3
    assert run(compute)[-1].speed.bandwidth == 1e3
    run(compute)
    assert refreshed == [False, True, True], "a cache may well beat it for good: it is not asked again and again"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((1, 3, 16), "seq_len"),
        ((256, 0, 16), "num_key_value_heads"),
        ((256, 3, 3), "bits"),
        ((256, 3, True), "bits"),
        ((256, 3, 4, 0), "q_group_size"),
        ((256, 3, 4, 32, -1), "residual_length"),
    ],
)
def test_bad_parameters_are_named(values, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
        KVCacheParams(*values)


def test_text_rows_and_ledger_lines_hold_the_numbers(compute):
    result = run(compute, 256, OWN, 4)[-1]
    text = result.text()
    for number in result.numbers():
        assert number.text in text and number.label in text and number.note in text
    assert re.search(r"^ +32,768 ", text, re.MULTILINE)
    lines = {m.name.removeprefix("kv_cache_lab."): m for m in result.measurements()}
    setting = dataclasses.asdict(result.params)
    assert setting["q_group_size"] == 32 and setting["residual_length"] == 32
    assert all(line.params == setting for line in lines.values())
    assert lines["cache_bytes"].value == by_hand(256, OWN, 4) and lines["cache_bytes"].label is Label.MEASURED
    assert lines["layer_bytes"].value == by_hand(256, OWN, 4) // LAYERS
    assert (lines["predicted_bytes"].value, lines["predicted_bytes"].label) == (by_hand(256, OWN, 4), Label.MODELLED)
    assert (lines["attention_s"].value, lines["attention_s"].backend) == (result.speed.timing.median, "torch")
    assert (lines["attention_s"].p10, lines["attention_s"].dtype) == (result.speed.timing.p10, "bfloat16")
    assert lines["floor_s"].label is Label.MODELLED
    assert (lines["perplexity"].value, lines["perplexity"].dtype) == (result.quality.perplexity, "float32")
    assert lines["perplexity"].shapes == {"tokens": [511, 511]}
    rows = result.rows()
    assert [row["quantity"] for row in rows] == list(lines) and {row["bits"] for row in rows} == {4}
    assert all(math.isfinite(row["value"]) and row["label"] in list(Label) for row in rows)
