import dataclasses
import re

import pytest
import torch

from labkit.engine import Decoder
from labkit.labs import _roofline_compute, _roofline_steps
from labkit.labs._result import Progress
from labkit.labs._roofline_compute import RooflineCompute
from labkit.labs._roofline_result import FAMILIES, RooflineParams, RooflineResult
from labkit.measure import Label
from labkit.roofline import kv_bytes_per_token, op_costs
from tests.labs.roofline_fixtures import CEILINGS, PEAKS, loaded

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("fixed_ceilings")


def run(compute: RooflineCompute, batch: int = 1, seq_len: int = 32, dtype: str = "float32") -> RooflineResult:
    """The final result of one setting."""
    params = RooflineParams(batch, seq_len, dtype, "tiny")
    *_, last = (step for step in compute(params, lambda: False) if isinstance(step, RooflineResult))
    return last


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def compute(model) -> RooflineCompute:
    return RooflineCompute(model, CPU)


def test_decode_comes_first_then_both(compute):
    steps = list(compute(RooflineParams(2, 32, "float32", "tiny"), lambda: False))
    results = [step for step in steps if isinstance(step, RooflineResult)]
    assert [result.prefill is None for result in results] == [True, False]
    assert results[0].decode == results[1].decode
    said = [step for step in steps if isinstance(step, Progress)]
    fractions = [step.fraction for step in said]
    assert fractions == sorted(fractions) and 0 < fractions[0] and fractions[-1] < 1
    assert "31 tokens for each of 2 sequences" in " ".join(step.text for step in said)


def test_each_op_of_the_step_is_timed_and_costed_in_order(compute, model):
    result = run(compute, batch=2)
    for phase, batch, q_len in ((result.decode, 2, 1), (result.prefill, 1, 32)):
        expected = op_costs(model.model.config, batch=batch, q_len=q_len, kv_len=32, dtype="float32", logits_to_keep=1)
        assert [op.cost for op in phase.ops] == expected
        assert all(op.seconds.median > 0 for op in phase.ops)
        peak, bandwidth = PEAKS[torch.float32], CEILINGS.read_bandwidth
        floors = [max(c.bytes / bandwidth, c.flops / peak) for c in expected]
        assert [op.floor_s for op in phase.ops] == pytest.approx(floors)
        assert phase.floor_s == pytest.approx(sum(floors))
        assert phase.tokens_per_second == pytest.approx(batch * q_len / phase.step.median)


def test_every_op_belongs_to_one_family(compute):
    names = [op.cost.name for op in run(compute).decode.ops]
    assert sorted(name for family in FAMILIES.values() for name in family) == sorted(names)


def test_the_known_quantities_move_as_they_must(compute, model):
    config = model.model.config
    base = run(compute, 1, 32).decode
    assert base.op("attention").cost.kv_bytes == 32 * kv_bytes_per_token(config, "float32")
    assert run(compute, 2, 32).decode.op("attention").cost.kv_bytes == 2 * base.op("attention").cost.kv_bytes
    assert run(compute, 1, 64).decode.op("attention").cost.kv_bytes == 2 * base.op("attention").cost.kv_bytes
    assert 2 * run(compute, 1, 32, "bfloat16").decode.total("weight_bytes") == base.total("weight_bytes")


def test_the_step_runs_on_a_cache_filled_to_the_context(compute, monkeypatch):
    seen = []
    real = _roofline_steps.op_times

    def spy(decoder, tokens, **options):
        filled = decoder.cache.keys[..., : decoder.length, :] if decoder.length else None
        empty = filled is not None and bool((filled == 0).all(-1).any())
        seen.append((tuple(tokens.shape), decoder.length, decoder.dtype, empty))
        return real(decoder, tokens, **options)

    monkeypatch.setattr(_roofline_steps, "op_times", spy)
    run(compute, 4, 64, "bfloat16")
    assert seen == [((4, 1), 63, torch.bfloat16, False), ((1, 64), 0, torch.bfloat16, False)]


def test_the_model_is_loaded_once_a_dtype(model, monkeypatch):
    calls = []

    def load(name, *, dtype, device):
        calls.append((name, dtype))
        return dataclasses.replace(model, model=loaded().model.to(dtype))

    monkeypatch.setattr(_roofline_compute, "load_model", load)
    _roofline_compute._load_once.cache_clear()
    first, second = RooflineCompute("a-name", CPU), RooflineCompute("a-name", CPU)
    for compute in (first, second, first):
        run(compute, dtype="float32")
        run(compute, dtype="bfloat16")
    _roofline_compute._load_once.cache_clear()
    assert calls == [("a-name", torch.float32), ("a-name", torch.bfloat16)]


def test_a_loaded_model_serves_its_own_dtype_and_stays_as_it_is(compute, model):
    assert compute._model_in(torch.float32) is model
    copied = compute._model_in(torch.bfloat16)
    assert copied.model.dtype == torch.bfloat16 and compute._model_in(torch.bfloat16) is copied
    assert model.model.dtype == torch.float32


@pytest.mark.parametrize("results_before", [0, 1])
def test_it_stops_when_cancelled(compute, results_before):
    """Cancelled at once, nothing is measured; cancelled after the decode step, there is no prefill."""
    results = []
    for step in compute(RooflineParams(1, 32, "float32", "tiny"), lambda: len(results) >= results_before):
        if isinstance(step, RooflineResult):
            results.append(step)
    assert len(results) == results_before
    assert all(result.prefill is None for result in results)
    assert (compute._decoders[1].cache is None) == (results_before == 0), "no cache is filled for nothing"


def test_it_stops_between_two_repeats_of_a_step(compute, monkeypatch):
    forwards = []
    real = Decoder.forward

    def counted(self, *args, **kwargs):
        forwards.append(self)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "forward", counted)
    steps = compute(RooflineParams(1, 32, "float32", "tiny"), lambda: len(forwards) >= 2)
    assert not [step for step in steps if isinstance(step, RooflineResult)]
    assert len(forwards) == 2


def test_what_does_not_fit_is_refused_before_allocating_with_a_setting_that_fits(model):
    config = model.model.config
    free = int(20 * 64 * kv_bytes_per_token(config, "float32"))
    compute = RooflineCompute(model, CPU, free_bytes=lambda: free)
    with pytest.raises(ValueError, match=r"batch: got 64 with seq_len 64 .* needs .*B .* free; takes") as refused:
        run(compute, 64, 64)
    assert compute._decoders[1].cache is None
    batch, seq_len = map(int, re.search(r"batch (\d+) at this length, or length (\d+)", str(refused.value)).groups())
    assert 1 <= batch < 64 and 1 <= seq_len < 64
    assert run(compute, batch, 64).params.batch == batch
    with pytest.raises(ValueError, match="takes at most"):
        run(compute, 2 * batch, 64)
    assert run(compute, 64, seq_len).params.seq_len == seq_len


def test_a_prompt_that_would_run_too_long_is_cut_and_says_so(compute, monkeypatch):
    whole = run(compute, 1, 64)
    assert whole.prefill.q_len == 64 and whole.prefill.uncut == ()
    assert "uncut_floor" not in {number.key for number in whole.numbers()}
    monkeypatch.setattr(_roofline_steps, "_PREFILL_FLOOR_S", whole.prefill.floor_s / 1.5)
    cut = run(compute, 1, 64)
    assert cut.prefill.q_len == cut.prefill.kv_len == 32
    assert cut.decode.kv_len == 64
    (number,) = (number for number in cut.numbers() if number.key == "uncut_floor")
    assert number.exact == pytest.approx(whole.prefill.floor_s)
    assert (number.label, number.text) == ("all 64 tokens", "not run") and "MODELLED" in number.note


def test_a_roof_that_a_step_beats_is_measured_again_and_only_raised(compute, monkeypatch):
    """Measured on a busy machine it stood too low; a second measurement that comes out lower takes nothing away."""
    low = dataclasses.replace(CEILINGS, read_bandwidth=1e3, matmul_flops=dict.fromkeys(PEAKS, 1e3))
    second = dataclasses.replace(low, read_bandwidth=1e12, matmul_flops={**low.matmul_flops, torch.float32: 1.0})
    refreshed = []

    def measure(device, refresh=False):
        refreshed.append(refresh)
        return second if refresh else low

    monkeypatch.setattr(_roofline_compute, "measure_ceilings", measure)
    result = run(compute)
    assert refreshed == [False, True]
    assert result.ceilings.read_bandwidth == 1e12
    assert result.peak == 1e3
    for op in result.decode.ops:
        assert op.floor_s == pytest.approx(max(op.cost.bytes / 1e12, op.cost.flops / 1e3))
    for _ in range(3):
        compute._highest = None
        run(compute)
    assert refreshed.count(True) == 2, "a cache may well beat the roof for good: it is not asked again and again"


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ((0, 32, "float32"), "batch"),
        ((1, 1, "float32"), "seq_len"),
        ((1, 32, "int4"), "dtype"),
        ((True, 32, "float32"), "batch"),
    ],
)
def test_bad_parameters_are_named(values, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
        RooflineParams(*values)


def test_text_holds_the_numbers_and_every_op(compute):
    result = run(compute, 2, 64)
    text = result.text()
    for number in result.numbers():
        assert number.text in text and number.label in text
    for op in result.decode.ops:
        assert len(re.findall(rf"^  {op.cost.name} ", text, re.MULTILINE)) == 2
    assert "read 10.0 TB/s, float32 matmul 40.0 TFLOP/s, ridge 4 FLOP/byte" in text


def test_numbers_are_what_was_measured_and_counted(compute, model):
    result = run(compute, 2, 64)
    exact = {number.key: number.exact for number in result.numbers()}
    decode, prefill, config = result.decode, result.prefill, model.model.config
    costs = op_costs(config, batch=2, q_len=1, kv_len=64, dtype="float32")
    assert exact["kv_bytes"] == 2 * 64 * kv_bytes_per_token(config, "float32")
    assert exact["weight_bytes"] == sum(cost.weight_bytes for cost in costs)
    assert exact["tpot"] == decode.step.median and exact["ttft"] == prefill.step.median
    assert exact["tokens_per_second"] == pytest.approx(2 / decode.step.median)
    assert exact["bandwidth"] == pytest.approx(sum(cost.bytes for cost in costs) / decode.step.median)
    assert exact["prefill_rate"] == pytest.approx(exact["prefill_flops"] / prefill.step.median)
    assert exact["decode_fraction"] == pytest.approx(decode.floor_s / decode.step.median)
    bound = next(number.note for number in result.numbers() if number.key == "decode_intensity")
    assert bound == "ridge 4: memory roof"


def test_rows_are_the_ops_and_a_total_of_each_phase(compute):
    result = run(compute, 2, 64)
    rows = result.rows()
    assert [row["op"] for row in rows] == 2 * [*(op.cost.name for op in result.decode.ops), "step"]
    assert {(row["batch"], row["seq_len"], row["dtype"], row["model"]) for row in rows} == {(2, 64, "float32", "tiny")}
    total = rows[18]
    assert (total["phase"], total["sequences"], total["q_len"], total["kv_len"]) == ("decode", 2, 1, 64)
    for column in ("flops", "weight_bytes", "kv_bytes", "activation_bytes", "floor_s"):
        assert total[column] == pytest.approx(sum(row[column] for row in rows[:18]))
    assert total["seconds"] == result.decode.step.median


def test_measurements_carry_parameters_spread_and_label(compute):
    result = run(compute, 2, 64)
    lines = {line.name.removeprefix("roofline_lab."): line for line in result.measurements()}
    params = {"batch": 2, "seq_len": 64, "dtype": "float32", "model": "tiny"}
    assert all(line.params == params and line.dtype == "float32" for line in lines.values())
    assert lines["tpot"].value == result.decode.step.median
    assert (lines["tpot"].p10, lines["tpot"].p90) == (result.decode.step.p10, result.decode.step.p90)
    assert lines["ttft"].shapes == {"tokens": [1, 64], "kv_len": [64]}
    assert lines["decode_kv_bytes"].label is Label.MODELLED and lines["tpot"].label is Label.MEASURED
    assert lines["decode_kv_bytes"].value == result.decode.op("attention").cost.kv_bytes
