import dataclasses
import math
import re

import pytest
import torch

from labkit.kernels import BackendUnavailable
from labkit.kernels.flash_attention.tiles import tiles
from labkit.labs import _flash_attention_compute, _flash_attention_steps
from labkit.labs._flash_attention_compute import FlashAttentionCompute
from labkit.labs._flash_attention_costs import ROLES, costs, moved_bytes, predicted_peak, product_flops
from labkit.labs._flash_attention_result import FlashAttentionParams, FlashAttentionResult, Found
from labkit.labs._flash_attention_steps import clock, tile_count
from labkit.labs._result import Progress
from labkit.measure import Label, Timing, peak_memory
from tests.labs.flash_attention_fixtures import (
    CPU,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    by_hand,
    keys_read,
    matrix,
    output,
    params,
    run,
)
from tests.labs.roofline_fixtures import CEILINGS

pytestmark = pytest.mark.usefixtures("fixed_flash_attention")


@pytest.fixture
def compute() -> FlashAttentionCompute:
    return FlashAttentionCompute(CPU, LENGTHS)


def test_what_is_quick_comes_first_and_each_result_is_fuller(compute):
    steps = list(compute(params(), lambda: False))
    results = [step for step in steps if isinstance(step, FlashAttentionResult)]
    timed = [[role for role in ROLES if r.seconds(role)] for r in results]
    assert timed[:2] == [["native"], ["native", "own"]] and timed[-1] == list(ROLES)
    recorded = [sum(r.peak(role) is not None for role in ROLES) for r in results]
    assert recorded[:5] == [0, 0, 1, 2, 3]
    assert [r.ceilings is not None for r in results] == sorted(r.ceilings is not None for r in results)
    grown = [list(r.curve) for r in results]
    assert grown == sorted(grown, key=len)
    assert [c for i, c in enumerate(grown) if i == 0 or c != grown[i - 1]] == [[], [128], [32, 128], [32, 64, 128]]
    last = results[-1]
    assert last.ceilings is CEILINGS and last.curve[128] == last.found
    assert all(last.seconds(role, n) > 0 and last.peak(role, n) > 0 for role in ROLES for n in (32, 64, 128))
    fractions = [step.fraction for step in steps if isinstance(step, Progress)]
    assert fractions == sorted(fractions) and 0 < fractions[0] and fractions[-1] < 1


def test_memory_grows_with_the_square_only_where_the_matrix_is_held(monkeypatch):
    monkeypatch.setattr(_flash_attention_steps, "peak_memory", peak_memory)
    compute = FlashAttentionCompute(CPU, (256, 512))
    results = {n: next(r for r in steps_of(compute, n) if r.peak("own")) for n in (256, 512)}
    for n, r in results.items():
        # Beside scores and weights: K and V repeated, and where causal a mask with what it is made from.
        assert 2 * matrix(n) < r.peak("standard") < 2 * matrix(n) + 2 * output(n) + 9 * n**2 + 4096
        # Beside one number a row: some tiles, and the state of a block of rows.
        assert output(n) + 4 * HEADS * n <= r.peak("own") < output(n) + 4 * HEADS * n + 2**17
    assert results[512].peak("standard") / results[256].peak("standard") == pytest.approx(4, rel=0.1)
    assert results[512].peak("own") / results[256].peak("own") < 2


def steps_of(compute: FlashAttentionCompute, seq_len: int):
    return (s for s in compute(params(seq_len), lambda: False) if isinstance(s, FlashAttentionResult))


def test_doubling_the_length_by_the_formulas():
    for causal in (True, False):
        short, long = (params(n, causal=causal) for n in (1024, 2048))
        extra = {role: [predicted_peak(p, role) - p.output_bytes for p in (short, long)] for role in ROLES}
        assert extra["standard"] == [2 * matrix(1024), 4 * 2 * matrix(1024)]
        assert extra["native"] == extra["own"] == [HEADS * 1024 * 4, 2 * HEADS * 1024 * 4]
        for role in ROLES:
            assert product_flops(long, role) / product_flops(short, role) == pytest.approx(4, rel=0.02)


def test_a_causal_mask_halves_what_is_needed_but_not_what_standard_attention_does():
    whole, half = params(4096, causal=False), params(4096)
    assert product_flops(whole, "native") == 4 * HEADS * 4096**2 * HEAD_DIM
    assert product_flops(half, "native") / product_flops(whole, "native") == pytest.approx(0.5, rel=1e-3)
    assert product_flops(half, "own") / product_flops(whole, "own") == pytest.approx(0.5, rel=0.01)
    assert product_flops(half, "standard") == product_flops(whole, "standard") == product_flops(whole, "native")


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_twice_the_size_read_keys_and_values_half_as_often(causal):
    small, large = (params(4096, block_size=size, causal=causal) for size in (16, 32))
    fixed = 2 * output(4096) + HEADS * 4096 * 4
    read = [moved_bytes(p, "own") - fixed for p in (small, large)]
    assert read == [keys_read(4096, size, causal) for size in (16, 32)]
    assert read[0] / read[1] == pytest.approx(2, rel=0.01)
    assert moved_bytes(small, "native") == 2 * output(4096) + 2 * 4096 * HEAD_DIM * 4 == moved_bytes(large, "native")
    assert moved_bytes(small, "standard") == moved_bytes(large, "standard") >= 4 * matrix(4096)


@pytest.mark.parametrize("seq_len", [16, 100, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_tiles_are_counted_as_the_kernel_visits_them(seq_len, causal, block_size):
    p = params(seq_len, causal=causal, block_size=block_size)
    assert tile_count(p) == len(list(tiles(seq_len, seq_len, (block_size, block_size), causal)))


def test_the_course_s_kernel_runs_at_the_chosen_block_sizes(compute, monkeypatch):
    asked = []
    real = _flash_attention_steps.flash_attention

    def attention(*tensors, **options):
        asked.append((tensors[0].shape, tensors[1].shape, options))
        return real(*tensors, **options)

    monkeypatch.setattr(_flash_attention_steps, "flash_attention", attention)
    result = run(compute, 64, block_size=32, causal=False, head_dim=32)[-1]
    q, k, options = asked[0]
    assert (tuple(q), tuple(k)) == ((1, HEADS, 64, 32), (1, 1, 64, 32))
    assert options == {"causal": False, "block_sizes": (32, 32), "backend": "tiled"}
    assert {call[2]["block_sizes"] for call in asked} == {(32, 32)} and result.difference < 1e-5


def test_another_output_of_the_course_s_kernel_is_seen(compute, monkeypatch):
    monkeypatch.setattr(_flash_attention_steps, "flash_attention", lambda q, k, v, **_: q + 100)
    assert run(compute, 64)[-1].difference > 50


@pytest.mark.parametrize("after", range(0, 60, 4))
def test_a_cancelled_setting_stops_before_the_next_call(compute, monkeypatch, after):
    asked, late = [], []

    def cancelled() -> bool:
        asked.append(len(asked) >= after)
        return asked[-1]

    def watched(real):
        def call(*arguments, **options):
            late.append(any(asked))
            return real(*arguments, **options)

        return call

    for name in ("run_attention", "flash_attention"):
        monkeypatch.setattr(_flash_attention_steps, name, watched(getattr(_flash_attention_steps, name)))
    list(compute(params(), cancelled))
    assert not any(late)
    assert any(asked) or after >= len(asked)


def test_a_cancelled_setting_does_not_go_through_the_shorter_lengths(compute, monkeypatch):
    lengths = []
    real = compute._briefly
    monkeypatch.setattr(compute, "_briefly", lambda p, *rest: lengths.append(p.seq_len) or real(p, *rest))
    for _ in compute(params(256), lambda: bool(lengths)):
        pass
    assert lengths == [32]


def test_what_does_not_fit_is_said_with_numbers_and_the_others_go_on(monkeypatch):
    # Room for standard attention at 64 tokens: three matrices in float32 and an output, and a tenth to spare.
    free = int((output(64) + 3 * matrix(64)) / 0.9) + 1
    compute = FlashAttentionCompute(CPU, LENGTHS, free_bytes=lambda: free)
    real = _flash_attention_steps.run_attention

    def attention(name, q, *rest, **options):
        assert name != "standard" or q.shape[2] <= 64, "it was run"
        return real(name, q, *rest, **options)

    monkeypatch.setattr(_flash_attention_steps, "run_attention", attention)
    result = run(compute, 128)[-1]
    why = result.of("standard").why_not
    assert why == "does not fit: takes up to 688 kB where 218 kB are free; fits up to 64 tokens"
    assert result.seconds("standard") is None and result.seconds("native") > 0 and result.seconds("own") > 0
    assert result.seconds("standard", 64) > 0 and result.speedup("native") is None
    shown = {n.key: n for n in result.numbers()}
    assert (shown["standard_s"].text, shown["standard_s"].note) == ("not run", why)
    assert shown["standard_formula"].exact == output(128) + 2 * matrix(128) and "standard_peak" not in shown
    assert why in result.text() and re.search(r"^ +128 +not run ", result.text(), re.MULTILINE)
    names = [m.name for m in result.measurements()]
    assert "flash_attention_lab.standard_s" not in names and "flash_attention_lab.native_s" in names
    none = FlashAttentionCompute(CPU, LENGTHS, free_bytes=lambda: 10_000)
    assert [run(none, 128)[-1].of(role).why_not[-19:] for role in ROLES] == ["; fits at no length"] * 3


def test_too_many_tiles_for_plain_pytorch_are_said(compute, monkeypatch):
    monkeypatch.setattr(_flash_attention_steps, "_MOST_TILES", {"clocked": 36, "recorded": 10})
    result = run(compute, 128)[-1]
    assert result.seconds("own") and result.peak("own") is None, "36 tiles"
    assert result.of("own").not_recorded == "36 tiles are too many to record"
    shown = {n.key: n for n in result.numbers()}
    assert shown["own_formula"].note == "MODELLED; 36 tiles are too many to record"
    assert result.peak("own", 64) > 0, "10 tiles"
    more = run(compute, 256)[-1]
    assert more.of("own").why_not.startswith("not run: 136 tiles") and more.seconds("native")


def test_block_sizes_that_the_kernel_cannot_run_are_said_and_the_others_go_on(compute, monkeypatch):
    def refuse(*_, block_sizes, **__):
        raise BackendUnavailable(f"backend 'triton' cannot run: {block_sizes} take too much shared memory")

    monkeypatch.setattr(_flash_attention_steps, "flash_attention", refuse)
    result = run(compute, 64)[-1]
    assert result.of("own") == Found(why_not="backend 'triton' cannot run: (16, 16) take too much shared memory")
    assert result.curve[32]["own"].why_not and result.difference is None
    assert result.seconds("native") and result.seconds("standard") and result.seconds("native", 32)


def test_shorter_lengths_are_measured_once_and_another_block_size_changes_one_curve(compute, monkeypatch):
    measured = []
    real = compute._briefly

    def briefly(p, roles, *rest):
        measured.append((p.seq_len, tuple(roles)))
        return real(p, roles, *rest)

    monkeypatch.setattr(compute, "_briefly", briefly)
    first = run(compute, 128)[-1]
    assert measured == [(32, ROLES), (64, ROLES)]
    run(compute, 128)
    assert len(measured) == 2
    other = run(compute, 128, block_size=32)[-1]
    assert measured[2:] == [(32, ("own",)), (64, ("own",))]
    assert other.curve[64]["native"] is first.curve[64]["native"]
    assert other.curve[64]["own"] is not first.curve[64]["own"]
    run(compute, 128, causal=False)
    assert measured[4:] == [(32, ROLES), (64, ROLES)]
    run(compute, 256)
    assert len(measured) == 6, "128 was chosen before"
    assert list(run(compute, 64)[-1].curve) == [32, 64], "longer ones are no part of it"


def test_ceilings_are_measured_once(compute, monkeypatch):
    calls = []
    monkeypatch.setattr(_flash_attention_compute, "measure_ceilings", lambda device: calls.append(device) or CEILINGS)
    run(compute, 32)
    run(compute, 64)
    assert calls == [CPU]


def test_calls_alternate_and_stop_between_two(monkeypatch):
    order = []
    ops = {name: lambda name=name: order.append(name) for name in "abc"}
    monkeypatch.setattr(_flash_attention_steps, "once", lambda op, device: op() or 1.0)
    times = clock(ops, CPU, 0.5, lambda: False)
    # More than the time allows, yet three of each: the median of two is the lower one.
    assert order == list("abcabcabc") and times["a"] == Timing(1.0, 1.0, 1.0, 3)
    order.clear()
    assert clock(ops, CPU, 0.5, lambda: len(order) == 4) is None and order == list("abca")
    order.clear()
    assert clock(ops, CPU, 0.5, lambda: len(order) == 1) is None and order == ["a"]
    given = []
    monkeypatch.setattr(_flash_attention_steps, "compare_ops", lambda *ops, **options: given.append(options) or {})
    # Three calls of a second each: as long for the quickest as makes six rounds of all.
    assert clock(ops, CPU, 18.0, lambda: False) == {}
    assert given == [{"device": CPU, "min_run_s": pytest.approx(6.0), "warmup": 0}]


def test_the_crossover_is_the_shortest_length_from_which_it_stays_faster():
    result = by_hand({32: (1.0, 2.0, 9.0), 64: (2.0, 1.0, 9.0), 128: (4.0, 5.0, 9.0), 256: (8.0, 4.0, 9.0)})
    assert result.faster_from("native") == 256 and result.faster_from("own") is None
    earlier = by_hand({32: (1.0, 2.0, 0.5), 64: (2.0, 1.0, 1.0), 128: (4.0, 1.0, 1.0)})
    assert earlier.faster_from("native") == 64 and earlier.faster_from("own") == 32
    shown = {n.key: n for n in earlier.numbers()}
    assert (shown["native_from"].text, shown["native_from"].exact) == ("from 64 tokens", 64.0)
    assert shown["native_from"].note == "32: 2x slower; 128: 4x faster"
    assert {n.key: n.text for n in result.numbers()}["own_from"] == "nowhere yet"
    assert shown["native_speedup"].text == "4x faster"
    lines = {m.name.removeprefix("flash_attention_lab."): m for m in earlier.measurements()}
    assert lines["native_faster_from"].value == 64 and lines["native_speedup"].value == 4.0


def test_achieved_flops_stand_beside_what_the_roof_allows():
    slow = dataclasses.replace(CEILINGS, read_bandwidth=1e9, matmul_flops={torch.float32: 1e10})
    result = dataclasses.replace(by_hand({128: (0.5, 0.1, 0.2)}, causal=False), ceilings=slow)
    needed = 4 * HEADS * 128**2 * HEAD_DIM
    assert result.rate("standard") == needed / 0.5 and result.rate("native") == needed / 0.1
    # Scores, softmax and output in float32: each at its bytes, since so few FLOPs a byte are none of a matmul's.
    by_op = [max(c.bytes / 1e9, c.flops / 1e10) for c in costs(result.params, "standard")]
    assert len(by_op) == 3 and result.floor_s("standard") == pytest.approx(sum(by_op))
    with_softmax = needed + 6 * HEADS * 128**2
    assert result.floor_s("native") == pytest.approx(
        max(with_softmax / 1e10, moved_bytes(result.params, "native") / 1e9)
    )
    assert result.attainable("native") == pytest.approx(needed / result.floor_s("native"))
    shown = {n.key: n for n in result.numbers()}
    assert shown["native_rate"].exact == needed / 0.1 and "attainable" in shown["native_rate"].note
    assert dataclasses.replace(result, ceilings=None).floor_s("native") is None


def test_what_else_is_installed_is_run_and_what_is_not_is_a_line(compute, monkeypatch):
    known = {"standard": None, "labkit torch": None, "labkit tiled": None, "sdpa flash": None, "sdpa math": None}
    known |= {"FlexAttention": None, "flash-attn 2": "not installed; pip install flash-attn"}
    asked = []
    monkeypatch.setattr(
        _flash_attention_compute, "attention_implementations", lambda *a: asked.append(a) or dict(known)
    )
    monkeypatch.setattr(_flash_attention_compute, "_SLOW_S", 1e9)
    result = run(compute, 64)[-1]
    assert asked == [(CPU, torch.float32, HEAD_DIM)]
    assert list(result.others) == ["sdpa flash", "sdpa math"]
    assert all(found.timing and found.peak_bytes for found in result.others.values())
    assert set(result.absent) == {"FlexAttention", "flash-attn 2"} and "compiling" in result.absent["FlexAttention"]
    assert "  flash-attn 2: not installed; pip install flash-attn" in result.text().splitlines()
    lines = [m for m in result.measurements() if m.name == "flash_attention_lab.other_s"]
    assert [line.backend for line in lines] == ["sdpa flash", "sdpa math"]
    monkeypatch.setattr(_flash_attention_compute, "_SLOW_S", 0.0)
    assert run(compute, 64)[-1].others["sdpa math"] == Found(why_not="standard attention took more than 0 s here")


def test_what_else_is_installed_and_fails_is_a_line_and_the_rest_goes_on(compute, monkeypatch):
    known = {"labkit torch": None, "sdpa flash": None, "sdpa efficient": None, "sdpa cudnn": None}
    monkeypatch.setattr(_flash_attention_compute, "attention_implementations", lambda *_: dict(known))
    real = _flash_attention_steps.run_attention
    errors = {"sdpa flash": RuntimeError("no kernel\n  for this"), "sdpa cudnn": torch.OutOfMemoryError("1 GB")}

    def attention(name, *rest, **options):
        if name in errors:
            raise errors[name]
        return real(name if name != "sdpa efficient" else "sdpa math", *rest, **options)

    monkeypatch.setattr(_flash_attention_steps, "run_attention", attention)
    result = run(compute, 64)[-1]
    assert result.others["sdpa flash"] == Found(why_not="RuntimeError: no kernel for this")
    assert result.others["sdpa cudnn"] == Found(why_not="out of memory: 1 GB")
    assert result.others["sdpa efficient"].timing and list(result.others) == [*list(known)[1:]]
    assert re.search(r"sdpa flash +not run +RuntimeError: no kernel for this$", result.text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"seq_len": 0}, "seq_len"),
        ({"head_dim": 0}, "head_dim"),
        ({"block_size": True}, "block_size"),
        ({"causal": 1}, "causal"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"dtype": "int8"}, "dtype"),
        ({"kernel": "torch"}, "kernel"),
    ],
)
def test_bad_parameters_are_named(values, name):
    with pytest.raises(ValueError, match=f"^{name}: got .*; takes "):
        FlashAttentionParams(**({"seq_len": 64, "head_dim": 64, "block_size": 16, "causal": True} | values))


def test_text_rows_and_ledger_lines_hold_the_numbers(compute):
    result = run(compute, 128)[-1]
    text = result.text()
    for number in result.numbers():
        assert number.text in text and number.label in text and number.note in text
    assert re.search(r"^ +64 ", text, re.MULTILINE) and re.search(r"^ +128 ", text, re.MULTILINE)
    lines = {m.name.removeprefix("flash_attention_lab."): m for m in result.measurements() if "other" not in m.name}
    setting = dataclasses.asdict(result.params)
    assert setting["block_size"] == 16 and setting["kernel"] == "tiled"
    assert all(line.params == setting for line in lines.values())
    assert lines["own_s"].shapes == {"q": [1, HEADS, 128, HEAD_DIM], "k": [1, 1, 128, HEAD_DIM]}
    backends = {"standard": "standard", "native": "labkit torch", "own": "labkit tiled"}
    for role, backend in backends.items():
        assert (lines[f"{role}_s"].value, lines[f"{role}_s"].label) == (result.seconds(role), Label.MEASURED)
        assert (lines[f"{role}_peak"].value, lines[f"{role}_peak"].label) == (result.peak(role), Label.MEASURED)
        assert lines[f"{role}_s"].p10 == result.of(role).timing.p10 and lines[f"{role}_s"].dtype == "float32"
        modelled = [lines[f"{role}_{what}"] for what in ("formula", "moved", "flops", "floor_s")]
        assert all(line.label is Label.MODELLED and line.backend == backend for line in modelled)
    assert lines["standard_formula"].value == output(128) + 2 * matrix(128)
    assert lines["difference"].value == result.difference
    rows = result.rows()
    assert {row["seq_len"] for row in rows} == {32, 64, 128} and {row["block_size"] for row in rows} == {16}
    shorter = [row for row in rows if row["seq_len"] == 64]
    assert [(row["quantity"], row["implementation"]) for row in shorter] == [
        (f"{role}_{what}", backend) for role, backend in backends.items() for what in ("s", "peak")
    ]
    assert all(math.isfinite(row["value"]) and row["label"] in list(Label) for row in rows)
