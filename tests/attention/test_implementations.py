"""Each implementation of attention is the real thing, or says in one line why it is not here."""

import dataclasses
import importlib.machinery
import sys
import types

import pytest
import torch

from labkit import hardware
from labkit.attention import _flex, _runners, implementations
from labkit.attention._runners import backend_line, repeated
from labkit.attention.implementations import (
    NAMES,
    attention_implementations,
    attention_table,
    measure_attention,
    run_attention,
)
from labkit.attention.traffic import AttentionShape, attention_flops
from labkit.kernels import BackendUnavailable

HERE = [name for name, why in attention_implementations("cpu", torch.float32, 16).items() if why is None]
# Compiling takes seconds a shape.
QUICK = [name for name in HERE if name != "FlexAttention"]
SHAPES = {
    "plain": (2, 4, 4, 33, 33),
    "gqa": (2, 6, 2, 20, 20),
    "end of a cache": (1, 4, 1, 7, 29),
    "decode": (2, 4, 2, 1, 17),
}


def made(name: str, dtype: torch.dtype = torch.float32, head_dim: int = 16) -> tuple[torch.Tensor, ...]:
    batch, heads, kv_heads, q_len, kv_len = SHAPES[name]
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return tuple(torch.randn(batch, *size, head_dim, dtype=torch.float64).to(dtype) for size in sizes)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    q, k, v = q.double(), repeated(k, q.shape[1]).double(), repeated(v, q.shape[1]).double()
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    place = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    if causal:
        scores = scores.masked_fill(torch.arange(k.shape[2]) > place, -torch.inf)
    return scores.softmax(-1) @ v


def test_what_a_cpu_has_and_why_it_lacks_the_rest():
    found = attention_implementations("cpu", "bfloat16", 64)
    assert list(found) == list(NAMES)
    expected = {"standard", "labkit torch", "labkit tiled", "sdpa math", "sdpa flash"}
    assert expected <= {name for name, why in found.items() if why is None}
    for name, why in found.items():
        assert why is None or (len(why) > 20 and "\n" not in why), name
    assert "CUDA GPU" in found["labkit triton"] and "GPUs" in found["sdpa cudnn"]
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        attention_implementations("cpu", "int8", 64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUICK)
def test_it_is_attention(name, shape, causal):
    q, k, v = made(shape)
    out = run_attention(name, q, k, v, causal=causal)
    assert out.shape == q.shape and out.dtype is q.dtype
    assert (out.double() - exact(q, k, v, causal)).abs().max() < 2e-6


@pytest.mark.parametrize("name", QUICK)
def test_in_bfloat16_it_errs_as_bfloat16_does(name):
    q, k, v = made("gqa", torch.bfloat16)
    expected = exact(q, k, v, True)
    error = (run_attention(name, q, k, v, causal=True).double() - expected).norm() / expected.norm()
    assert error < 8e-3


@pytest.mark.parametrize("name", QUICK)
def test_gradients_pass_through(name):
    q, k, v = (x.requires_grad_() for x in made("gqa"))
    dout = torch.randn(q.shape)
    ours = torch.autograd.grad(run_attention(name, q, k, v, causal=True), (q, k, v), dout)
    theirs = torch.autograd.grad(exact(q, k, v, True), (q, k, v), dout.double())
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_standard_is_eager_attention_of_transformers():
    """Bit for bit, with K and V repeated, the mask added and the softmax in float32."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    q, k, v = made("gqa", torch.bfloat16)
    module = types.SimpleNamespace(num_key_value_groups=3, training=False)
    hidden = ~torch.ones(20, 20, dtype=torch.bool).tril()
    mask = torch.zeros(20, 20, dtype=torch.bfloat16).masked_fill(hidden, torch.finfo(torch.bfloat16).min)
    theirs, _ = eager_attention_forward(module, q, k, v, mask[None, None], scaling=0.25)
    assert torch.equal(run_attention("standard", q, k, v, causal=True), theirs.transpose(1, 2))


def test_sdpa_runs_the_backend_that_it_names(monkeypatch):
    q, k, v = made("plain")
    asked = []
    original = _runners.sdpa_kernel
    monkeypatch.setattr(_runners, "sdpa_kernel", lambda backend: asked.append(backend.name) or original(backend))
    for name in ("sdpa math", "sdpa flash"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run_attention(name, q, k, v, causal=True)
        ran = {event.key for event in profile.key_averages()}
        assert ("aten::_scaled_dot_product_attention_math" in ran) == (name == "sdpa math")
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in ran) == (name == "sdpa flash")
    assert asked == ["MATH", "FLASH_ATTENTION"]


def test_arguments_that_do_not_fit():
    q, k, v = made("gqa")
    for wrong, name in (
        ((q[0], k, v), "q"),
        ((q, k[:, :, :, :8], v), "k"),
        ((q, k, v[:, :1]), "v"),
        ((q, k.half(), v), "k"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            run_attention("standard", *wrong, causal=True)
    with pytest.raises(ValueError, match="name: got 'sdpa flesh'.*did you mean sdpa flash"):
        run_attention("sdpa flesh", q, k, v, causal=True)
    with pytest.raises(ValueError, match="20 queries'; takes at most k's 7, where causal"):
        run_attention("standard", q, k[:, :, :7], v[:, :, :7], causal=True)
    with pytest.raises(BackendUnavailable, match="sdpa cudnn: PyTorch has this kernel for GPUs alone"):
        run_attention("sdpa cudnn", q, k, v, causal=True)


# Packages


def fake_package(monkeypatch, name: str, function, origin: str | None = "here") -> None:
    """A module that looks installed; without `origin`, as a folder that another distribution left."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=origin)
    if function is not None:
        module.flash_attn_func = function
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name, module", [("flash-attn 2", "flash_attn"), ("flash-attn 4", "flash_attn.cute")])
def test_a_package_gets_its_own_layout(name, module, monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, causal=False):
        assert (q.shape, k.shape, v.shape) == ((1, 7, 4, 16), (1, 29, 1, 16), (1, 29, 1, 16))
        calls.append(causal)
        out = exact(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2).to(q.dtype)
        return out if name == "flash-attn 2" else (out, torch.zeros(1))

    fake_package(monkeypatch, "flash_attn", flash_attn_func, "here" if name == "flash-attn 2" else None)
    if name == "flash-attn 4":
        fake_package(monkeypatch, "flash_attn.cute", flash_attn_func)
    found = attention_implementations("cpu", torch.bfloat16, 16)
    assert found[name] == "installed, but it needs a CUDA GPU"
    other = {"flash-attn 2": "flash-attn 4", "flash-attn 4": "flash-attn 2"}[name]
    assert found[other].startswith("not installed; pip install")
    q, k, v = made("end of a cache")
    for causal in (True, False):
        out = _runners.RUNNERS[name].run(q, k, v, causal)
        assert (out - exact(q, k, v, causal)).abs().max() < 1e-6
    assert calls == [True, False]


def test_the_install_line_is_that_of_doctor():
    assert attention_implementations("cpu", torch.float16, 64)["flash-attn 2"] == hardware.backends()["flash-attn"]


def test_what_a_gpu_would_be_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    gpu = torch.device("cuda")
    why = _runners._why_no_package
    assert why(None, gpu, torch.bfloat16, 128, least=8) is None
    assert "capability 9.0; this GPU has 8.6" in why(None, gpu, torch.bfloat16, 128, least=9)
    assert "not float32" in why(None, gpu, torch.float32, 128, least=8)
    assert "not 100" in why(None, gpu, torch.bfloat16, 100, least=8)


# FlexAttention


def test_flex_attentions_blocks_are_those_that_are_seen():
    for q_len, kv_len in ((300, 300), (100, 300), (1, 77), (128, 128), (129, 513), (256, 1024), (200, 326)):
        mask = _flex.causal_blocks(q_len, kv_len, torch.device("cpu"))
        sees = torch.arange(kv_len) <= torch.arange(q_len)[:, None] + kv_len - q_len
        padded = torch.zeros(-(-q_len // 128) * 128, -(-kv_len // 128) * 128, dtype=torch.bool)
        padded[:q_len, :kv_len] = sees
        blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2)
        some = blocks.flatten(2).any(2)
        assert torch.equal(mask.to_dense()[0, 0].bool(), some)
        for row in range(len(some)):
            n_full = int(mask.full_kv_num_blocks[0, 0, row])
            whole = mask.full_kv_indices[0, 0, row, :n_full].tolist()
            assert all(blocks[row, column].any(1).sum() == blocks[row, column, :, -1].sum() for column in whole)
            assert all(bool(blocks[row, column][: min(128, q_len - 128 * row)].all()) for column in whole)
            cut = mask.kv_indices[0, 0, row, : int(mask.kv_num_blocks[0, 0, row])].tolist()
            assert sorted(whole + cut) == some[row].nonzero()[:, 0].tolist()


@pytest.mark.slow
@pytest.mark.skipif("FlexAttention" not in HERE, reason="it does not run here")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_attention_is_attention(shape, causal):
    q, k, v = made(shape)
    with torch.no_grad():
        out = run_attention("FlexAttention", q, k, v, causal=causal)
    assert (out.double() - exact(q, k, v, causal)).abs().max() < 2e-6


def test_flex_attention_makes_torch_compile_forget_before_it_refuses(monkeypatch):
    """A ninth shape would be an error, and uncompiled it would make the whole matrix."""
    forgot = []
    monkeypatch.setattr(_flex, "_seen", set())
    monkeypatch.setattr(_flex, "_compiled", lambda: lambda q, k, v, block_mask, enable_gqa: q)
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgot.append(len(_flex._seen)))
    for length in (*range(1, 10), 9, 8):
        q = torch.zeros(1, 1, length, 16)
        _flex.run(q, q, q, False)
    assert (
        forgot
        == [
            8,
        ]
        and len(_flex._seen) == 2
    )
    with pytest.raises(NotImplementedError, match="no backward pass on a CPU"):
        _flex.run(q.requires_grad_(), q, q, False)


# Measuring


def measured(names=QUICK, shape="gqa", **options) -> dict:
    found = measure_attention(names, *made(shape), **({"causal": True, "min_run_s": 0.0} | options))
    return {m.name: m for m in found}


@pytest.mark.parametrize("backward", [False, True])
def test_every_figure_of_a_measurement(backward):
    found = measured([*QUICK, "sdpa cudnn"], backward=backward)
    assert list(found) == [*QUICK, "sdpa cudnn"]
    flops = attention_flops(AttentionShape(2, 6, 2, 20, 20, 16, True)) * (3.5 if backward else 1)
    for name in QUICK:
        m = found[name]
        assert m.absent is None and m.seconds.n >= 5 and m.backend
        assert m.flops_per_second == pytest.approx(flops / m.seconds.median)
        assert 0 < m.error < 1e-6
        # The output at least; with gradients also those of q, k and v.
        assert m.peak_bytes >= 4 * 2 * 20 * 16 * ((6 + 6 + 2 + 2) if backward else 6)
    assert found["sdpa cudnn"] == implementations.AttentionMeasurement(
        "sdpa cudnn", absent="PyTorch has this kernel for GPUs alone"
    )


def test_the_error_is_measured_at_the_end_of_a_cache_too():
    assert measured(("standard",), shape="end of a cache")["standard"].error < 1e-6
    assert measured(("standard",), shape="end of a cache", causal=False)["standard"].error < 1e-6


def test_memory_of_the_matrix_and_without_it():
    q = torch.randn(1, 2, 512, 16)
    found = measure_attention(("standard", "labkit torch", "sdpa flash"), q, q, q, causal=True, min_run_s=0.0)
    matrix = 2 * 512 * 512 * 4
    standard, ours, flash = (m.peak_bytes for m in found)
    assert standard >= 2 * matrix > matrix > 4 * max(ours, flash)


def test_a_wrong_result_shows_in_the_error(monkeypatch):
    wrong = dataclasses.replace(_runners.RUNNERS["standard"], run=lambda q, k, v, causal: torch.zeros_like(q))
    monkeypatch.setitem(_runners.RUNNERS, "standard", wrong)
    # One row of queries that a tile forgot, the last.
    whole = _runners.RUNNERS["labkit torch"].run
    forgot = dataclasses.replace(
        _runners.RUNNERS["labkit torch"],
        run=lambda q, k, v, causal: whole(q, k, v, causal).index_fill(2, torch.tensor([19]), 0.0),
    )
    monkeypatch.setitem(_runners.RUNNERS, "labkit torch", forgot)
    found = measured(("standard", "labkit torch"))
    assert found["standard"].error == pytest.approx(1.0) and found["labkit torch"].error > 0.05


@pytest.mark.parametrize("after", [0, 4])
def test_one_that_fails_is_a_line_and_stops_no_other(after, monkeypatch):
    calls = []

    def fails(q, k, v, causal):
        calls.append(1)
        if len(calls) > after:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")
        return exact(q, k, v, causal).float()

    runner = dataclasses.replace(_runners.RUNNERS["sdpa math"], run=fails)
    monkeypatch.setitem(_runners.RUNNERS, "sdpa math", runner)
    found = measured(("standard", "sdpa math", "labkit torch"))
    line = "out of memory: CUDA out of memory. Tried to allocate 20 GiB"
    assert found["sdpa math"] == implementations.AttentionMeasurement("sdpa math", absent=line)
    assert found["standard"].seconds and found["labkit torch"].seconds


def test_what_would_not_fit_is_not_tried(monkeypatch):
    info = dataclasses.replace(hardware.describe("cpu"), free_bytes=100_000)
    monkeypatch.setattr(implementations, "describe", lambda device: info)
    never = dataclasses.replace(_runners.RUNNERS["standard"], run=lambda *_: pytest.fail("it ran"))
    monkeypatch.setitem(_runners.RUNNERS, "standard", never)
    q = torch.randn(1, 2, 200, 16)
    standard, ours = measure_attention(("standard", "labkit torch"), q, q, q, causal=False, min_run_s=0.0)
    assert standard.absent == "it would take 960 kB for its matrices, and 100 kB are free; 61 tokens would fit"
    assert ours.absent is None


def test_what_ran_is_said_with_what_it_costs():
    q, k, _ = made("end of a cache")
    assert backend_line("standard", q, k, True).endswith("K and V repeated 4 times")
    assert "a mask of 7 x 29" in backend_line("sdpa flash", q, k, True)
    assert "mask" not in backend_line("sdpa flash", q, k, False)
    assert "repeated 4 times" in backend_line("sdpa efficient", q, k, False)


def test_the_table_holds_every_figure_and_every_line():
    text = attention_table(measured(("sdpa cudnn", "standard", "labkit torch")).values()).text()
    lines = text.splitlines()
    assert lines[2].startswith("standard") and lines[4].startswith("sdpa cudnn")
    assert "GPUs alone" in lines[4] and "FLOP/s" in lines[2] and "flash_attention: torch" in lines[3]
