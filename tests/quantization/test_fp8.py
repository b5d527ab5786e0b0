"""FP8: the codes, the products, and the devices that it is refused on."""

import pytest
import torch

from labkit.models import tiny_model
from labkit.quality import kl_divergence
from labkit.quantization import FP8Config, FP8Linear, quantize_, weight_bytes
from labkit.quantization import fp8 as room

_IDS = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(1))
_REASON = room.why_no_fp8(torch.device("cpu"))
_needs_cpu_fp8 = pytest.mark.skipif(bool(_REASON), reason=_REASON)


def _values() -> torch.Tensor:
    """All finite values of the format, by its bits: 1 of sign, 4 of exponent with bias 7, 3 of mantissa, and no
    infinities, so that only the two patterns of ones are no numbers."""
    found = []
    for code in range(256):
        sign, exponent, mantissa = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
        if (exponent, mantissa) != (15, 7):
            magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2 ** (exponent - 7)
            found.append(sign * magnitude)
    return torch.tensor(sorted(set(found)))


def test_weights_go_to_the_nearest_value_of_the_format() -> None:
    weight = torch.randn(6, 64) * torch.logspace(-5, 3, 6)[:, None]
    weight[3] = 0
    module = room.quantize_rows(weight)
    assert module.qweight.dtype == torch.float8_e4m3fn
    scaled = weight / module.scales[:, None]
    assert float(module.qweight.float().abs().max()) == 448
    assert bool(module.qweight.float()[3].eq(0).all())
    nearest = (scaled[..., None] - _values()).abs().amin(-1)
    torch.testing.assert_close((module.qweight.float() - scaled).abs(), nearest, rtol=1e-3, atol=1e-6)


@_needs_cpu_fp8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 16, 33])
def test_it_multiplies_the_codes_with_both_scales(dtype: torch.dtype, rows: int) -> None:
    """Codes multiplied in float64. An odd width too, which a CPU takes."""
    weight, bias = torch.randn(24, 40), torch.randn(24)
    module = room.quantize_rows(weight, bias)
    x = (torch.randn(rows, 40) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    scales = (x.float().abs().amax(1, keepdim=True) / 448) if rows else torch.ones(0, 1)
    codes = (x.float() / scales).to(torch.float8_e4m3fn).double()
    assert rows == 0 or codes.abs().amax(1).eq(448).all()
    expected = codes @ module.qweight.double().T * scales.double() * module.scales.double() + bias.double()
    got = module(x)
    assert got.dtype == dtype and got.shape == (rows, 24)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    assert bool(((got.double() - expected).abs() <= tolerance * expected.abs().amax(1, keepdim=True)).all())


@_needs_cpu_fp8
def test_a_model_takes_a_quarter_of_its_float32_bytes_and_says_nearly_the_same() -> None:
    model = tiny_model()
    before = model(input_ids=_IDS).logits
    float_bytes = weight_bytes(model)
    matrices = [p for name, p in model.named_parameters() if "_proj" in name]
    report = quantize_(model, FP8Config(), progress=False)
    saved = sum(3 * p.numel() - 4 * p.shape[0] for p in matrices)
    assert weight_bytes(model) == float_bytes - saved
    assert len(report.matrices) == 14 and {m.bits for m in report.matrices} == {8}
    assert {m.error for m in report.matrices} == {None}
    loss = kl_divergence(before, model(input_ids=_IDS).logits)
    assert 1e-4 < loss < 0.2
    module = model.model.layers[0].mlp.up_proj
    assert isinstance(module, FP8Linear)
    model.to(torch.bfloat16)
    assert module.qweight.dtype == torch.float8_e4m3fn and module.scales.dtype == torch.float32
    assert kl_divergence(before, model(input_ids=_IDS).logits.float()) < 0.3


def test_a_device_without_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    reason = room.why_no_fp8.__wrapped__(torch.device("cuda", 0))
    assert reason.startswith("NVIDIA A100 has compute capability 8.0") and "8.9" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert room.why_no_fp8.__wrapped__(torch.device("cuda", 0)) == ""
    monkeypatch.setattr(room, "why_no_fp8", lambda _: reason)
    model = tiny_model()
    with pytest.raises(ValueError, match="model: got 'one on cpu: NVIDIA A100 .*; takes a model on a GPU of compute"):
        quantize_(model, FP8Config(), progress=False)
    assert not any(isinstance(m, FP8Linear) for m in model.modules())


def test_a_cpu_whose_matmul_fails_or_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> torch.Tensor:
        raise NotImplementedError("'_scaled_mm' is not implemented\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    reason = room.why_no_fp8.__wrapped__(torch.device("cpu"))
    assert reason == "PyTorch has no FP8 matmul for the cpu here ('_scaled_mm' is not implemented)"
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: torch.zeros(16, 16))
    assert "wrong sums" in room.why_no_fp8.__wrapped__(torch.device("cpu"))


def test_sides_that_a_gpu_does_not_take_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "why_no_fp8", lambda _: "")
    with torch.device("meta"):
        fitting, odd = torch.nn.Linear(32, 48), torch.nn.Linear(32, 40)
    room.check_linears({"a": fitting, "head": torch.nn.Linear(33, 7)})
    with pytest.raises(ValueError, match="modules_to_not_convert: got 'nothing that keeps b out, which is 40 x 32'"):
        room.check_linears({"a": fitting, "b": odd})


def test_a_gpu_is_given_what_its_row_wise_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales (M, 1) and (1, N) in float32, the second matrix column-major, bfloat16 out; on meta tensors."""
    seen = {}

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        seen.update(a=a, b=b, **options)
        return a.new_empty(a.shape[0], b.shape[1], dtype=options["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(room, "why_no_fp8", lambda _: "")
    module = room.quantize_rows(torch.randn(48, 32), torch.randn(48)).to("meta")
    y = module(torch.empty(2, 3, 32, device="meta", dtype=torch.bfloat16))
    assert y.shape == (2, 3, 48) and y.dtype == torch.bfloat16
    assert seen["a"].is_contiguous() and seen["b"].T.is_contiguous() and seen["b"].shape == (32, 48)
    assert seen["scale_a"].shape == (6, 1) and seen["scale_b"].shape == (1, 48)
    assert seen["scale_a"].dtype == seen["scale_b"].dtype == torch.float32
    assert seen["out_dtype"] == torch.bfloat16


def test_bits_are_fixed() -> None:
    assert FP8Config().bits == 8
    with pytest.raises(ValueError, match="bits_per_module: got .*; takes nothing with a FP8Config"):
        quantize_(tiny_model(), FP8Config(), bits_per_module={"model.layers.0.mlp.up_proj": 4}, progress=False)
