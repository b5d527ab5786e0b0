import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from labkit.labs import _quantization_compute, _quantization_steps
from labkit.labs._quantization_compute import QuantizationCompute
from labkit.labs._quantization_models import Models, fitting_group_sizes
from labkit.labs._quantization_result import QuantizationParams, QuantizationResult
from labkit.labs._quantization_text import calibration_ids, prepare
from labkit.labs._result import Progress
from labkit.measure import Label
from labkit.models import shared_copy
from labkit.quality import perplexity
from labkit.quantization import AWQConfig, GPTQConfig, RTNConfig, quantize_
from labkit.quantization.calibration import LayerInputs
from labkit.quantization.recorded import RecordedRun
from tests.labs.quantization_fixtures import CPU, KINDS, loaded, run, tokenizer
from tests.labs.roofline_fixtures import CEILINGS

CONFIGS = {"RTN": RTNConfig, "GPTQ": GPTQConfig, "AWQ": AWQConfig}
RUN = RecordedRun("GPTQ", 4, 32, False, 16.3, 4.5, 130.0, 14.57, "tiny", "a machine", "2026-11-30", "abc")


@pytest.fixture(autouse=True)
def _fixed(monkeypatch):
    monkeypatch.setattr(_quantization_compute, "measure_ceilings", lambda device, refresh=False: CEILINGS)
    monkeypatch.setattr(_quantization_compute, "recorded_run", lambda *_: None)


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture
def compute(model) -> QuantizationCompute:
    return QuantizationCompute(model, CPU)


def prepared(compute: QuantizationCompute, bits: int = 4, group_size: int = 32, method: str = "RTN") -> Models:
    """The models of a compute that has run once."""
    run(compute, bits, group_size, method)
    return compute._models


def first(compute: QuantizationCompute, bits: int, group_size: int, method: str = "RTN") -> QuantizationResult:
    """What is known once the weights are packed."""
    params = QuantizationParams(bits, group_size, method, "tiny")
    return next(step for step in compute(params, lambda: False) if isinstance(step, QuantizationResult))


def test_the_fast_figures_come_first_and_each_result_holds_what_the_one_before_held(compute):
    steps = list(compute(QuantizationParams(4, 32, "RTN", "tiny"), lambda: False))
    results = [step for step in steps if isinstance(step, QuantizationResult)]
    known = [tuple(bool(getattr(r, part)) for part in ("layers", "speed", "quality")) for r in results]
    assert known[0] == (False, False, False) and known[-1] == (True, True, True)
    assert known == sorted(known) and len(results) == 3 + 6
    assert [r.quality.windows for r in results[-6:]] == [1, 2, 3, 4, 5, 6] and results[-1].quality.firm
    fractions = [step.fraction for step in steps if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and 0 < fractions[0] and fractions[-1] < 1


@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (3, 16), (8, -1)])
def test_bytes_are_those_of_a_model_quantized_whole_by_the_method(compute, model, method, bits, group_size):
    sizes = first(compute, bits, group_size, method).sizes
    copy = loaded().model
    calibration = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    report = quantize_(copy, CONFIGS[method](bits=bits, group_size=group_size), calibration, progress=False)
    assert sizes.packed_bytes == sum(matrix.nbytes for matrix in report.matrices)
    assert sizes.bits_per_weight == report.bits_per_weight
    rest = {id(p): 2 * p.numel() for p in copy.parameters()}
    assert sizes.other_bytes == sum(rest.values())
    assert sizes.float_bytes == sum({id(p): 2 * p.numel() for p in model.model.parameters()}.values())


def test_known_bytes(compute):
    sizes = {setting: first(compute, *setting).sizes for setting in ((4, 64), (8, 64), (4, 32))}
    assert [s.bits_per_weight for s in sizes.values()] == [4.375, 8.375, 4.75]
    four, eight, smaller = sizes.values()
    assert eight.code_bytes == 2 * four.code_bytes and smaller.code_bytes == four.code_bytes


def test_the_error_is_that_of_the_output_on_what_the_text_brings(compute, model):
    result = run(compute, 3, 16)[-1]
    assert list(result.layers.by_kind) == KINDS and all(len(e) == 2 for e in result.layers.by_kind.values())
    packed = shared_copy(model.model)
    quantize_(packed, RTNConfig(3, 16), progress=False)
    seen = {}
    linear = model.model.model.layers[1].mlp.down_proj
    handle = linear.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    ids = prepare(model, None).errors
    model.model(input_ids=ids, use_cache=False)
    handle.remove()
    approximation = packed.model.layers[1].mlp.down_proj.portable().dequantize()
    y, y_packed = F.linear(seen["x"], linear.weight), F.linear(seen["x"], approximation)
    expected = ((y_packed - y).square().sum() / y.square().sum()).item()
    assert result.layers.by_kind["down_proj"][1] == pytest.approx(expected, rel=1e-4)
    assert result.layers.tokens == ids.numel() == 256


@pytest.mark.parametrize("method", ["GPTQ", "AWQ"])
def test_the_block_is_what_the_method_makes_of_that_layer_in_the_float_model(compute, model, method):
    result = run(compute, 3, 32, method)[-1]
    assert result.block.layer == 1 and result.block.method == method
    copy, calibration = loaded().model, calibration_ids(model)
    config = CONFIGS[method](bits=3, group_size=32)
    calls = {}
    for kind in KINDS:
        parent = "self_attn" if kind[0] in "qkvo" else "mlp"
        linear = model.model.model.layers[1].get_submodule(f"{parent}.{kind}")
        calls[kind] = (linear, f"{parent}.{kind}")
    skipped = ("lm_head", "model.layers.0")
    report = quantize_(copy, config, calibration, modules_to_not_convert=skipped, progress=False)
    assert len(report.matrices) == len(KINDS)
    if method == "GPTQ":  # AWQ's matrices carry scales that their inputs are divided by
        inputs = compute._inputs
        for kind, (linear, name) in calls.items():
            difference = copy.model.layers[1].get_submodule(name).portable().dequantize() - linear.weight
            x = inputs.of[f"model.layers.1.{name}"]
            expected = (x @ difference.T).square().sum() / (x @ linear.weight.T).square().sum()
            assert result.block.errors[kind] == pytest.approx(expected.item(), rel=1e-3)
    assert result.block.ratio < 1, "what the method is for"
    assert result.block.rtn == {kind: errors[1] for kind, errors in result.layers.by_kind.items()}


def test_calibration_runs_once(compute, monkeypatch):
    calls = []
    monkeypatch.setattr(
        _quantization_steps, "LayerInputs", lambda *args: calls.append(args) or LayerInputs(*args), raising=True
    )
    run(compute, 4, 32, "GPTQ")
    run(compute, 3, 32, "GPTQ")
    assert len(calls) == 1


def test_perplexity_is_that_of_the_packed_model_beside_the_float_one_over_the_same_windows(compute, model):
    results = run(compute, 2, 32)
    texts = prepare(model, None)
    packed = shared_copy(model.model)
    quantize_(packed, RTNConfig(2, 32), progress=False)
    for result in results[-6:]:
        ids = texts.evaluation[: 512 * result.quality.windows]
        assert result.quality.perplexity == pytest.approx(perplexity(packed, ids, 512), rel=1e-4)
        assert result.quality.baseline == pytest.approx(perplexity(model, ids, 512), rel=1e-4)


def test_the_float_model_is_evaluated_once_and_again_after_a_failure(compute, monkeypatch):
    real, streams = _quantization_compute.perplexity_stream, []

    def stream(model, ids, length):
        streams.append(model)
        return real(model, ids, length)

    monkeypatch.setattr(_quantization_compute, "perplexity_stream", stream)
    first, second = ([r.quality.baseline for r in run(compute, bits)[-6:]] for bits in (4, 8))
    plain = compute._models.loaded.model
    assert streams.count(plain) == 1 and first == second and len(set(first)) == 6

    def broken():
        raise MemoryError
        yield

    compute._float_stream, compute._float_perplexity = broken(), []
    with pytest.raises(MemoryError):
        run(compute)
    assert run(compute)[-1].quality.baseline == first[-1]


@pytest.mark.parametrize("last", ["start", "layers", "speed", "quality"])
def test_it_stops_when_cancelled(compute, last):
    """Between any two parts, and between two windows of the perplexity."""
    results = []

    def cancelled() -> bool:
        return bool(results) and (last == "start" or bool(getattr(results[-1], last)))

    for step in compute(QuantizationParams(4, 32, "RTN", "tiny"), cancelled):
        if isinstance(step, QuantizationResult):
            results.append(step)
    parts = ("layers", "speed", "quality")
    held = [part for part in parts if getattr(results[-1], part)]
    assert held == ([] if last == "start" else list(parts[: parts.index(last) + 1]))
    assert last != "quality" or results[-1].quality.windows == 1


def test_it_stops_between_the_float_window_and_the_packed_one(compute):
    steps = compute(QuantizationParams(4, 32, "RTN", "tiny"), lambda: bool(compute._float_perplexity))
    assert all(step.quality is None for step in steps if isinstance(step, QuantizationResult))
    assert len(compute._float_perplexity) == 1


def test_the_whole_model_by_another_method_is_the_recorded_run(compute, model, monkeypatch):
    asked = []
    monkeypatch.setattr(_quantization_compute, "recorded_run", lambda *args: asked.append(args) or RUN)
    result = run(compute, 4, 32, "GPTQ")[-1]
    assert asked == [("GPTQ", 4, 32)] and result.quality is None
    assert (result.perplexity, result.baseline) == (16.3, 14.57)
    (line,) = (m for m in result.measurements() if m.name == "quantization_lab.perplexity")
    assert (line.label, line.value, line.device, line.params["date"]) == (Label.RECORDED, 16.3, "a machine", RUN.date)
    assert "RECORDED 2026-11-30" in result.text()
    assert run(compute)[-1].recorded is None, "RTN is measured"
    other = dataclasses.replace(RUN, model="another")
    monkeypatch.setattr(_quantization_compute, "recorded_run", lambda *_: other)
    assert run(compute, 4, 32, "GPTQ")[-1].perplexity is None


def test_what_was_not_recorded_is_said_in_words(model, monkeypatch):
    result = run(QuantizationCompute(model, CPU), 4, 32, "GPTQ")[-1]
    assert result.perplexity is None and "not recorded  the whole model, for tiny at this setting" in result.text()
    monkeypatch.setattr(_quantization_compute, "recorded_run", lambda *_: RUN)
    own = run(QuantizationCompute(model, CPU, "words " * 200), 4, 32, "GPTQ")[-1]
    assert own.perplexity is None and "not recorded  the whole model, on your own text" in own.text()
    assert not any(line.name.endswith(".perplexity") for line in own.measurements())


def test_the_given_model_stays_as_it_is(model):
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    compute = QuantizationCompute(model, CPU)
    for method in CONFIGS:
        run(compute, 3, 16, method)
    after = dict(model.model.named_parameters())
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.model.dtype is torch.float32
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules())


def test_decoding_runs_the_packed_codes_in_bfloat16_and_counts_what_it_reads(compute):
    result = run(compute, 4, 32)[-1]
    models = compute._models
    packed = models.pack(result.params)
    fast = models.decoding(packed)
    assert fast.dtype is torch.bfloat16
    for name, weight in packed.weights.items():
        assert torch.equal(fast.get_submodule(name).portable().codes(), weight.codes())
    # 4 bits, and for each group of 32 a bfloat16 scale and offset, beside an embedding and a head of 256 x 64.
    matrices = result.sizes.weights * (4 + 32 / 32) / 8
    norms = 2 * 64 * (2 * 2 + 1)
    assert result.speed.read_bytes == matrices + norms + 2 * 256 * 64
    assert result.float_speed.read_bytes == 2 * result.sizes.weights + norms + 2 * 256 * 64
    assert result.speed.ceiling == CEILINGS.read_bandwidth / result.speed.read_bytes
    assert result.speed.fraction == pytest.approx(result.speed.tokens_per_second / result.speed.ceiling)
    assert 1 / result.speed.step.median == result.speed.tokens_per_second and result.speed.step.n >= 2


@pytest.mark.parametrize(
    ("bits", "group_size", "packed"), [(4, 32, True), (8, 32, True), (3, 32, False), (4, 16, False)]
)
def test_the_backend_that_ran_is_named_with_the_reason(compute, bits, group_size, packed):
    result = run(compute, bits, group_size)[-1]
    assert result.speed.packed_matmul is packed
    (number,) = (n for n in result.numbers() if n.key == "backend")
    assert number.text == ("packed matmul" if packed else "dequantize, then matmul")
    if not packed:
        assert ("the weight has 3" if bits == 3 else "groups of 16") in number.note


def test_a_ceiling_that_a_step_beats_is_measured_again_and_only_raised(compute, monkeypatch):
    refreshed = []

    def measure(device, refresh=False):
        refreshed.append(refresh)
        return dataclasses.replace(CEILINGS, read_bandwidth=1e12 if refresh else 1.0)

    monkeypatch.setattr(_quantization_compute, "measure_ceilings", measure)
    result = run(compute)[-1]
    assert refreshed == [False, True]
    assert result.speed.bandwidth == result.float_speed.bandwidth == 1e12


def test_what_does_not_fit_is_refused_before_packing_with_bits_that_fit(model, monkeypatch):
    compute = QuantizationCompute(model, CPU, free_bytes=lambda: free)
    free = 10**9
    models = prepared(compute)
    weights = sum(linear.weight.numel() for linear in models.plan.linears.values())
    free = int(2 * weights * (4 + 1) / 8 / 0.9) + 1  # the bfloat16 copy is there already
    assert run(compute, 4, 32)[-1].quality.firm
    monkeypatch.setattr(Models, "pack", lambda *_: pytest.fail("packed"))
    with pytest.raises(
        ValueError, match=r"^bits: got 8 .* needs .*B beside the model where .*B are free; takes at most 4"
    ):
        run(compute, 8, 32)
    free = 1000
    with pytest.raises(ValueError, match="takes a smaller model"):
        run(compute, 2, 32)


def test_own_text_takes_the_place_of_the_course_s(model, tmp_path):
    words = "first paragraph " * 50 + "\n\n" + "second paragraph " * 40
    path = tmp_path / "mine.txt"
    path.write_text(words)
    ids = torch.tensor(list(words.encode()))[:1024]
    by_string, by_path = (run(QuantizationCompute(model, CPU, text))[-1] for text in (words, path))
    for result in (by_string, by_path):
        assert result.corpus == "your text" and "Quality on your text" in result.text()
        assert (result.quality.windows, result.quality.of_windows, result.quality.context_length) == (2, 2, 512)
    assert by_string.quality.baseline == pytest.approx(perplexity(model, ids, 512), rel=1e-4)
    short = run(QuantizationCompute(model, CPU, "words " * 20))[-1]
    assert (short.quality.of_windows, short.quality.context_length) == (1, 120)


def test_a_text_that_will_not_do_is_named(model, tmp_path):
    with pytest.raises(ValueError, match="^text: got '8 tokens'; takes at least 32 tokens, or the path of a file"):
        run(QuantizationCompute(model, CPU, "mine.txt"))
    with pytest.raises(ValueError, match=r"^text: got '.*nowhere.txt'; takes the path of a text file"):
        QuantizationCompute(model, CPU, tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="^text: got 'int'; takes "):
        QuantizationCompute(model, CPU, 3)


@pytest.mark.parametrize(
    ("values", "name"),
    [((5, 64, "RTN"), "bits"), ((4, 8, "RTN"), "group_size"), ((4, 64, "HQQ"), "method"), ((True, 64, "RTN"), "bits")],
)
def test_bad_parameters_are_named(values, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
        QuantizationParams(*values)


def test_group_sizes_are_those_that_divide_every_matrix():
    assert fitting_group_sizes({576, 1536}) == (16, 32, 64, 96, -1)
    assert fitting_group_sizes({4096, 14336}) == (16, 32, 64, 128, -1)


def test_numbers_text_and_rows_hold_what_was_measured(compute):
    result = run(compute, 3, 32, "GPTQ")[-1]
    text, exact = result.text(), {number.key: number.exact for number in result.numbers()}
    for number in result.numbers():
        assert number.text in text and number.label in text
    assert exact["model_bytes"] == result.sizes.packed_bytes + result.sizes.other_bytes
    assert exact["size_ratio"] == pytest.approx(exact["model_bytes"] / result.sizes.float_bytes)
    assert exact["error_worst"] == max(max(errors) for errors in result.layers.by_kind.values())
    assert exact["block_ratio"] == pytest.approx(
        math.prod(result.block.errors[kind] / result.block.rtn[kind] for kind in KINDS) ** (1 / 7)
    )
    rows = result.rows()
    assert {(row["bits"], row["group_size"], row["method"], row["model"]) for row in rows} == {(3, 32, "GPTQ", "tiny")}
    errors = {(row["matrix"], row["layer"]): row["value"] for row in rows if row["quantity"] == "output_error_RTN"}
    assert errors == {(kind, i): e for kind, es in result.layers.by_kind.items() for i, e in enumerate(es)}
    assert {r["matrix"]: r["value"] for r in rows if r["quantity"] == "output_error_GPTQ"} == result.block.errors


def test_measurements_carry_parameters_backend_and_windows(compute):
    result = run(compute, 4, 32)[-1]
    lines = {line.name.removeprefix("quantization_lab."): line for line in result.measurements()}
    params = {"bits": 4, "group_size": 32, "method": "RTN", "model": "tiny", "corpus": "pydoc"}
    assert all(line.params == params and line.label is Label.MEASURED for line in lines.values())
    assert lines["bits_per_weight"].value == 4.75 and lines["code_bytes"].value == result.sizes.code_bytes
    assert (lines["perplexity"].value, lines["perplexity"].dtype) == (result.quality.perplexity, "float32")
    assert lines["perplexity"].shapes == {"windows": [6, 512]}
    assert (lines["tpot"].value, lines["tpot"].backend, lines["tpot"].dtype) == (
        result.speed.step.median,
        "torch",
        "bfloat16",
    )
    exploded = dataclasses.replace(result, quality=dataclasses.replace(result.quality, perplexity=math.inf))
    assert "perplexity" not in {m.name.removeprefix("quantization_lab.") for m in exploded.measurements()}


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="^model: got 'a model without a tokenizer'"):
        run(QuantizationCompute(dataclasses.replace(loaded(), tokenizer=None), CPU))
    assert tokenizer("ab").input_ids == [97, 98]
