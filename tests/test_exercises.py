"""Exercises: solutions pass, known wrong answers fail by name, untouched stubs are not attempted, nothing raises."""

import importlib.util
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit import _check, exercises
from labkit.engine.ladder import refusals
from labkit.engine.sampling import probabilities
from labkit.engine.serving import RequestTimes, ServingMetrics
from labkit.exercises import _ch01_speed, _ch05_fixed, _ch06_load, _session, check, hint, status
from labkit.exercises._exercise import Exercise, Failed, without_labkit
from labkit.exercises._limit import within
from labkit.exercises._watch import watched, without_fused_attention
from labkit.exercises.ch01 import EXERCISES as CH01
from labkit.exercises.ch01 import measured_decode
from labkit.exercises.ch02 import EXERCISES as CH02
from labkit.exercises.ch03 import EXERCISES as CH03
from labkit.exercises.ch04 import EXERCISES as CH04
from labkit.exercises.ch05 import EXERCISES as CH05
from labkit.exercises.ch06 import EXERCISES as CH06
from labkit.kernels.bits import words_per_row
from labkit.measure import Label, Measurement
from labkit.models import LoadedModel, model_config, tiny_model
from labkit.roofline import op_costs, parameter_count


def _solutions_of(chapter: str):
    """Loaded by path, so that no other package named tests can stand before it."""
    path = Path(__file__).parent / "solutions" / f"{chapter}.py"
    spec = importlib.util.spec_from_file_location(f"solutions_{chapter}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ch01 = _solutions_of("ch01")
CHAPTERS = {
    1: (CH01, ch01),
    2: (CH02, _solutions_of("ch02")),
    3: (CH03, _solutions_of("ch03")),
    4: (CH04, _solutions_of("ch04")),
    5: (CH05, _solutions_of("ch05")),
    6: (CH06, _solutions_of("ch06")),
}
NAMES = [exercise.name for registered, _ in CHAPTERS.values() for exercise in registered]
ANSWERS, STUBS, SOLUTIONS, WRONGS = (
    {name: value for _, texts in CHAPTERS.values() for name, value in getattr(texts, table).items()}
    for table in ("ANSWERS", "STUBS", "SOLUTIONS", "WRONG")
)
BANDWIDTH = 5e9


def _measured(scale: float = 1.0, **changes: object) -> Measurement:
    """A decode measurement of the default model at `scale` times what its bytes and the bandwidth allow."""
    config = model_config("smollm2-135m")
    context, kv = 300, 2 * 30 * 3 * 64
    value = scale * BANDWIDTH / (4 * (parameter_count(config) + context * kv))
    params = {"model": "smollm2-135m", "context": context, "bytes_per_element": 4, "bandwidth": BANDWIDTH}
    return Measurement("decode", value, "tokens/s", **({"params": params} | changes))


def _answer(name: str, source: str, measured: Measurement | None = None) -> object:
    """What the notebook's cell after the tagged one would pass to check()."""
    namespace: dict[str, object] = {"measured": measured or _measured()}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    return eval(ANSWERS[name], namespace)


@pytest.fixture(autouse=True)
def _new_session(monkeypatch):
    monkeypatch.setattr(exercises, "_this_session", _session.Session())


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_exercise_has_a_stub_a_solution_and_wrong_answers(chapter):
    registered, texts = CHAPTERS[chapter]
    for table in (texts.STUBS, texts.SOLUTIONS, texts.ANSWERS, texts.WRONG):
        assert list(table) == [exercise.name for exercise in registered]
    assert all(len(wrong) >= 5 for wrong in texts.WRONG.values())
    assert all(len(e.hints) >= 3 and e.chapter == chapter and e.name in e.signature for e in registered)
    assert all(exercises.EXERCISES[e.name] is e for e in registered)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_passes(name):
    result = check(name, _answer(name, SOLUTIONS[name]))
    assert result.passed is True, result.message


ALSO_RIGHT = [
    (name, source)
    for _, texts in CHAPTERS.values()
    for name, sources in getattr(texts, "ALSO_RIGHT", {}).items()
    for source in sources
]


@pytest.mark.parametrize(("name", "source"), ALSO_RIGHT, ids=[f"{i}-{pair[0]}" for i, pair in enumerate(ALSO_RIGHT)])
def test_an_answer_that_is_right_in_another_way_passes(name, source):
    result = check(name, _answer(name, source))
    assert result.passed is True, result.message


WRONG = [(name, i, *pair) for name, pairs in WRONGS.items() for i, pair in enumerate(pairs)]


@pytest.mark.parametrize(
    ("name", "_", "source", "says"), WRONG, ids=[f"{w[0]}-{w[3].replace(' ', '_')}" for w in WRONG]
)
def test_a_wrong_answer_fails_and_the_message_names_the_property(name, _, source, says):
    result = check(name, _answer(name, source))
    assert result.passed is False
    assert says in result.message


_RUNGS = ("step", "bfloat16", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation")
_DTYPE = {32: torch.float32, 16: torch.bfloat16, 8: torch.float8_e4m3fn}


@given(
    st.lists(st.sampled_from(_RUNGS), unique=True),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(list(_DTYPE)),
    st.booleans(),
)
def test_which_rungs_go_together_is_what_the_ladder_says(rungs, device, bits, has_draft):
    answer = _answer("goes_together", SOLUTIONS["goes_together"])
    with pytest.MonkeyPatch.context() as patch:  # the rules of a GPU, on a machine without one
        patch.setattr(_check, "device", lambda name, value: torch.device(value))
        refused = refusals(rungs, device=device, dtype=_DTYPE[bits], has_proposer=has_draft)
    assert answer(rungs, device == "cuda", bits, has_draft) == [rung for rung in rungs if rung not in refused]


@given(st.integers(1, 40), st.integers(0, 1000), st.floats(0.01, 0.99))
def test_the_top_p_that_is_asked_for_is_the_engines(vocab, seed, top_p):
    probs = (2 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(seed))).softmax(-1)
    answer = _answer("top_p_filter", SOLUTIONS["top_p_filter"])(probs, top_p)
    assert torch.allclose(answer, probabilities(probs.log(), 1.0, 0, top_p), rtol=1e-4, atol=1e-7)


def test_the_load_that_is_read_is_what_the_client_reports():
    for levels in (case[1] for case in _ch06_load._cases()):
        rows, _ = _answer("read_load", SOLUTIONS["read_load"])(levels)
        for concurrency, requests in levels.items():
            seen = [
                RequestTimes(r.sent, r.times, r.times[-1], len(r.times))
                if r.times
                else RequestTimes(r.sent, error="no")
                for r in requests
            ]
            span = max(r.ended for r in seen) - min(r.sent for r in seen)
            told = ServingMetrics.of(concurrency, seen, span)
            found = told.mean_ttft_ms, told.mean_tpot_ms, told.request_throughput, told.output_throughput
            ttft, tpot, *throughputs = rows[concurrency]
            assert found == pytest.approx((1000 * ttft, 1000 * tpot, *throughputs))


def test_an_operator_that_pytorch_lacks_is_no_untouched_stub():
    """PyTorch raises NotImplementedError as a stub does."""
    result = check("online_softmax", lambda *_: torch.ones(2, 2, dtype=torch.bool) @ torch.ones(2, 2, dtype=torch.bool))
    assert result.passed is False
    assert "your function raised NotImplementedError" in result.message


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_stub_is_not_attempted(name):
    for result in (check(name, _answer(name, STUBS[name])), check(name, None), check(name, ...)):
        assert result.passed is None
        assert result.message == "not attempted yet"
        assert repr(result) == f"{name}: not attempted yet"
    assert f"{name}  " in repr(status()) and "not attempted yet" in repr(status())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "answer",
    [
        42,
        "a string",
        {"a": 1},
        (),
        (1, 2, 3),
        lambda: 1,
        lambda *a: "text",
        lambda *a: float("nan"),
        lambda *a: -1.0,
        lambda *a: (None, 0),
        lambda *a: [][0],
        lambda *a: (_ for _ in ()).throw(SystemExit(3)),
    ],
)
def test_nothing_that_is_passed_raises_or_passes(name, answer):
    result = check(name, answer)
    assert result.passed is False
    assert result.message


def test_a_function_that_returns_nothing_later_on_is_a_fault_not_a_stub():
    result = check("memory_bound_batch", lambda peak, bandwidth, size: 206 + 1 if size == 2 else None)
    assert result.passed is False and "returned nothing" in result.message


def test_an_error_of_the_learner_is_told_with_the_signature():
    result = check("model_memory", lambda config: (1, 1))
    assert "TypeError" in result.message and "model_memory(config, batch, seq_len, bytes_per_element)" in result.message


def test_an_unknown_name_lists_the_near_ones():
    for call in (lambda: check("model_memroy", None), lambda: hint("model_memroy")):
        with pytest.raises(ValueError, match=r"name: got 'model_memroy'.*did you mean model_memory"):
            call()


@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (0.82, True), (1.3, True), (0.78, False), (1.4, False)])
def test_tokens_per_second_must_be_within_a_quarter_of_the_measurement(scale, passes):
    solution = ch01.SOLUTIONS["tokens_per_second"]
    result = check("tokens_per_second", _answer("tokens_per_second", solution, _measured(scale)))
    assert result.passed is passes, result.message
    assert f"measured {_measured(scale).value:.1f}" in result.message


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (9.3, "pass the measurement too"),
        (_measured(label=Label.MODELLED), "pass the measurement too"),
        (_measured(params={"model": "smollm2-135m"}), "lacks context, bytes_per_element, bandwidth"),
    ],
)
def test_tokens_per_second_compares_with_a_measurement_only(measured, says):
    solution = ch01.SOLUTIONS["tokens_per_second"]
    function = _answer("tokens_per_second", solution)[0]
    for answer in ((function, measured), [function, measured]):
        result = check("tokens_per_second", answer)
        assert result.passed is False and says in result.message
    assert "pass the measurement too" in check("tokens_per_second", function).message


def test_measured_decode_times_real_decode_steps(monkeypatch):
    monkeypatch.setattr(_ch01_speed, "_MIN_RUN_S", 0.1)
    loaded = LoadedModel(tiny_model(), tokenizer=None, name="tiny")
    measured = measured_decode(loaded, context=40, reference_context=4)
    assert measured.label is Label.MEASURED and measured.unit == "tokens/s" and measured.dtype == "float32"
    assert 0 < measured.p10 <= measured.value <= measured.p90
    bandwidth = measured.params.pop("bandwidth")
    assert measured.params == {"model": "tiny", "context": 40, "bytes_per_element": 4}
    costs = op_costs(loaded.model.config, batch=1, q_len=1, kv_len=5, dtype="float32")
    # The reference step is nearly the same step, so that its speed cannot be far off on so small a model.
    assert bandwidth == pytest.approx(sum(c.bytes for c in costs) * measured.value, rel=1.0)
    for bad in ({"context": 0}, {"context": 10**9}, {"reference_context": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            measured_decode(loaded, **({"context": 12} | bad))


def test_hints_come_one_by_one_and_end():
    total = len(exercises.EXERCISES["model_memory"].hints)
    shown = [hint("model_memory").shown for _ in range(total + 2)]
    assert [len(s) for s in shown] == [*range(1, total + 1), total, total]
    assert shown[0] == shown[-1][:1]
    assert f"hint {total} of {total}" in repr(hint("model_memory"))
    assert "0 of 3" in repr(status()) and f"{total} of {total}" in repr(status())


def test_status_counts_attempts_and_keeps_a_pass():
    def row() -> list[str]:
        return next(r for r in status().table.rows if r[1] == "memory_bound_batch")[2:4]

    assert tuple(row()) == ("not attempted yet", "0")
    check("memory_bound_batch", None)
    assert tuple(row()) == ("not attempted yet", "0")
    check("memory_bound_batch", lambda *a: 1)
    assert tuple(row()) == ("not yet passed", "1")
    check("memory_bound_batch", _answer("memory_bound_batch", ch01.SOLUTIONS["memory_bound_batch"]))
    check("memory_bound_batch", lambda *a: 1)
    assert tuple(row()) == ("passed", "3")


def test_what_is_shown_is_escaped():
    def shout(*_: object) -> object:
        raise ValueError("<script>alert(1)</script>")

    shown = check("model_memory", shout)
    assert "<script>" in repr(shown)
    assert "<script>" not in shown._repr_html_() and "&lt;script&gt;" in shown._repr_html_()
    markup = Exercise("x", 1, "", "", ("<b>bold</b>",), str)
    assert "<b>" not in _session.Session().next_hint(markup)._repr_html_()
    assert "<table>" in status()._repr_html_()


def test_the_tripwire_sees_any_way_of_calling_and_leaves_the_profiler_as_it_was():
    from labkit import roofline, sizing

    config = model_config("smollm2-135m")
    for call in (lambda: roofline.parameter_count(config), lambda: sizing.weight_bytes(config, "float32")):
        with pytest.raises(Failed, match="write it yourself"):
            without_labkit(call, ("sizing",))
        assert sys.getprofile() is None
    assert without_labkit(lambda: model_config("smollm2-135m").vocab_size, ("sizing",)) == 49152


def test_the_tripwire_of_a_room_sees_all_its_modules_and_no_other():
    def call() -> int:
        return words_per_row(8, 4)

    for modules in (("kernels/",), ("kernels/bits",), ("quantization/", "kernels/")):
        with pytest.raises(Failed, match="labkit's own words_per_row"):
            without_labkit(call, modules)
    for modules in (("kernel/",), ("kernels",), ("kernels/bit",), ("kernels/bits/",), ("quantization/",)):
        assert without_labkit(call, modules) == 1


def test_a_watch_counts_what_lives_at_once_and_a_storage_once():
    given = torch.zeros(10, 30)

    def let_go(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            (x @ x.T).sum()  # 100 and 1, gone before the next
        return x.T.contiguous()  # a copy of 300

    def keep(x: torch.Tensor) -> list[torch.Tensor]:
        return [x @ x.T for _ in range(5)]

    def view(x: torch.Tensor) -> list[torch.Tensor]:
        product = x @ x.T
        return [product.T, product[1:], product.view(-1), x[:5]]

    assert watched(let_go, given)[1].peak == 300
    assert watched(keep, given)[1].peak == 500
    value, seen = watched(view, given)
    assert seen.peak == 100 and value[0].shape == (10, 10)
    assert {(10, 10), (9, 10), (100,), (5, 30)} <= seen.shapes
    assert (10, 30) not in watched(lambda x: x[0] > 0, given)[1].shapes
    assert watched(lambda x: torch.ones(20, 30, dtype=torch.bool), given)[1].peak == 600


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_watch_sees_attention_computed_whole_however_it_is_called(backend):
    given = torch.ones(1, 1, 4, 8)
    calls = [
        F.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
        lambda q, k, v: torch.nn.MultiheadAttention(8, 1)(q[0], k[0], v[0]),
    ]
    if backend is SDPBackend.FLASH_ATTENTION:
        calls.append(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)
    with sdpa_kernel(backend):
        for call in calls:
            with pytest.raises(Failed, match="which computes attention whole"):
                without_fused_attention(watched(call, given, given, given)[1])
    without_fused_attention(watched(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, given, given, given)[1])


def test_a_loop_that_never_ends_ends_its_check(monkeypatch):
    """One that calls nothing, so that only the clock can tell, and one that keeps all that is raised in it."""
    monkeypatch.setattr(_ch05_fixed, "_LIMIT_S", 0.2)

    def spins(*_: object) -> object:
        while True:
            pass

    def keeps(target: object, draft: object, tokens: list[int], *_: object) -> object:
        while True:
            try:
                draft(tokens)
            except Exception:
                pass

    for function, says in ((spins, "had not ended after 0.2 seconds"), (keeps, "calls of target and draft, and not")):
        result = check("fixed_speculation", function)
        assert result.passed is False and says in result.message and "or the loop does not end" in result.message
    assert sys.getprofile() is None


def test_a_time_limit_changes_nothing_for_what_ends_and_holds_in_any_thread():
    assert within(60, lambda: 7, "too long") == 7
    with pytest.raises(KeyError, match="its own"):
        within(60, lambda: {}["its own"], "too long")

    def briefly() -> None:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass

    for _ in range(5):  # it ends at about the moment when the limit is looked at, and nothing is raised after that
        with suppress(Failed):
            assert within(0.0, briefly, "too long") is None
        briefly()
    caught: list[str] = []

    def spin() -> None:
        while True:
            pass

    def in_thread() -> None:
        try:
            within(0.1, spin, "too long")
        except Failed as failure:
            caught.append(str(failure))

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    thread.join(30)
    assert caught == ["too long"]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("pack_row", "quantization/packing"),
        ("pack_row", "kernels/bits"),
        ("gptq_update", "quantization/gptq"),
        ("awq_scale", "quantization/awq"),
        ("fixed_calibration", "corpora"),
        ("cache_size", "sizing"),
        ("cache_size", "kv_cache/sizing"),
        ("merge_heads", "attention/merge"),
        ("block_allocator", "kv_cache/blocks"),
        ("fixed_attention", "attention/mha"),
        ("fixed_attention", "kernels/decode_attention/reference"),
        ("fixed_attention", "kv_cache/paged"),
        ("attention_traffic", "attention/traffic"),
        ("online_softmax", "kernels/flash_attention/tiled"),
        ("tiled_attention", "kernels/flash_attention/tiled"),
        ("tiled_attention", "attention/implementations"),
        ("block_backward", "kernels/flash_attention/tiled"),
        ("fixed_flash_attention", "kernels/flash_attention/reference"),
        ("accept_step", "speculative/acceptance"),
        ("residual", "speculative/acceptance"),
        ("emit", "speculative/wrong_rules"),
        ("best_draft_length", "speculative/theory"),
        ("prompt_lookup", "speculative/prompt_lookup"),
        ("fixed_speculation", "speculative/decode"),
        ("fixed_speculation", "engine/sampling"),
        ("predict_rung", "engine/ladder/estimate"),
        ("goes_together", "engine/ladder/rungs"),
        ("choose_stack", "engine/advisor"),
        ("top_p_filter", "engine/sampling"),
        ("read_load", "engine/serving/metrics"),
        ("fixed_ladder", "engine/ladder/result"),
    ],
)
def test_what_a_chapter_teaches_may_not_be_called_in_its_exercise(name, module):
    """A right answer, whose code says that it lies in labkit's own file."""
    namespace: dict[str, object] = {}
    exec(compile(SOLUTIONS[name], str(Path(exercises.__file__).parents[1] / f"{module}.py"), "exec"), namespace)
    result = check(name, namespace[ANSWERS[name]])
    assert result.passed is False and "write it yourself" in result.message


def test_no_check_waits_for_ever(monkeypatch):
    def endless(*_):
        while True:
            pass

    monkeypatch.setattr("labkit.exercises._LIMIT_S", 0.5)
    for name in ("predict_rung", "cache_size"):
        result = check(name, endless)
        assert result.passed is False and "never end" in result.message, name
