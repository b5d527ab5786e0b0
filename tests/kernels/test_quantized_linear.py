"""quantized_linear: both layouts against float64, the layouts into each other, and which backend runs."""

import dataclasses
import sys

import pytest
import torch
import torch.nn.functional as F

from labkit.kernels import BackendUnavailable, PackedWeight, choose_backend, quantized_linear
from labkit.kernels.bits import PACKED_BITS, pack_bits
from labkit.kernels.quantized_linear import Int4PackWeight, decode_layout
from tests.kernels.packed import packed, same


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shape", [(16, 32, 32), (48, 576, 64), (32, 384, 128), (16, 512, 256)])
def test_the_layout_goes_there_and_back_bit_by_bit(bits: int, sym: bool, act_order: bool, shape: tuple) -> None:
    out_features, in_features, group = shape
    portable = packed(torch.randn(out_features, in_features), bits, group, sym=sym, act_order=act_order)
    laid_out = decode_layout(portable, torch.bfloat16)
    assert isinstance(laid_out, Int4PackWeight)
    assert decode_layout(laid_out, torch.bfloat16) is laid_out and decode_layout(portable, torch.float32) is portable
    assert same(decode_layout(laid_out, torch.float32), portable) and same(laid_out.unpack(), portable)
    assert torch.equal(laid_out.dequantize(), portable.dequantize())
    assert laid_out.nbytes == sum(tensor.nbytes for tensor in laid_out.tensors.values())
    assert laid_out.packed.nbytes == portable.qweight.nbytes


def test_every_code_survives_the_layout() -> None:
    for bits in (4, 8):
        codes = torch.arange(1 << bits).repeat(16, 256 // (1 << bits))
        portable = packed(torch.randn(16, 256), bits, 32)
        portable = dataclasses.replace(portable, qweight=pack_bits(codes, bits))
        assert torch.equal(decode_layout(portable, torch.bfloat16).unpack().codes().long(), codes)


def errors(x: torch.Tensor, weight: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the packed matmul, and of PyTorch's on the weight in bfloat16; both against float64."""
    laid_out = decode_layout(weight, torch.bfloat16)
    assert isinstance(laid_out, Int4PackWeight)
    exact = x.double() @ weight.dequantize(torch.float64).T
    got = quantized_linear(x, laid_out)
    assert got.shape == exact.shape and got.dtype == torch.bfloat16
    plain = F.linear(x, weight.dequantize(torch.bfloat16))
    return (got.double() - exact).abs(), (plain.double() - exact).abs()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("rows", [(1,), (4,), (17,), (2, 3), ()])
def test_the_packed_matmul_errs_at_most_twice_as_much(
    bits: int, sym: bool, act_order: bool, rows: tuple[int, ...]
) -> None:
    weight = packed(torch.randn(48, 576), bits, 64, sym=sym, act_order=act_order)
    for x in (torch.randn(*rows, 576), torch.rand(*rows, 576)):
        error, plain = errors(x.bfloat16(), weight)
        assert error.max() <= 2 * plain.max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["one outlier a group", "positive"])
def test_a_zero_point_far_from_the_middle(bits: int, kind: str) -> None:
    dense = torch.randn(48, 576)
    if kind == "positive":
        dense = dense.abs()
    else:
        dense[:, ::64] = 12.0
    weight, x = packed(dense, bits, 64), torch.rand(4, 576).bfloat16()
    error, plain = errors(x, weight)
    # Of 4 bits the offset (8 - z) * s is rounded to bfloat16: an error that all weights of a group share.
    offset = (8 - weight.zeros.double()) * weight.scales.double()
    shift = (offset.to(torch.bfloat16).double() - offset).abs()
    assert bits == 8 or bool((shift <= weight.scales.double() / 37).all())
    shared = x.double().unflatten(1, (-1, 64)).sum(-1).abs() @ shift.T if bits == 4 else 0
    assert (error - shared).max() <= 2 * plain.max()


def test_how_far_the_offset_of_every_zero_point_is_off_at_every_scale() -> None:
    """All 128 significands of a bfloat16 scale in several powers of 2, beside all 16 zero points."""
    scales = (torch.arange(128, 256)[:, None] * torch.tensor([2.0**-20, 2.0**-9, 2.0**-7, 2.0])).flatten()
    scales = scales[:, None].expand(-1, 16).to(torch.bfloat16).contiguous()
    zeros = torch.arange(16, dtype=torch.uint8).expand(len(scales), -1).contiguous()
    codes = torch.randint(0, 16, (len(scales), 512))
    weight = PackedWeight(pack_bits(codes, 4), scales, zeros, None, 4, 32, 512)
    laid_out = decode_layout(weight, torch.bfloat16)
    exact = (8 - zeros.double()) * scales.double()
    off = (laid_out.scales_and_offsets[..., 1].T.double() - exact).abs() / scales.double()
    assert off.max() == 1 / 37
    assert [z for z in range(16) if bool((off[:, z] == 0).all())] == [0, 4, 6, 7, 8, 9, 10, 12]
    # And it is this offset that the op adds: ones for x in one group give its 32 codes' sum times s, and 32 b.
    x = torch.zeros(16, 512).unflatten(1, (16, 32))
    x[range(16), range(16)] = 1
    got = quantized_linear(x.flatten(1).bfloat16(), laid_out).double().T
    sums = (codes.unflatten(1, (16, 32)).sum(-1) - 8 * 32) * scales.double()
    expected = sums + 32 * laid_out.scales_and_offsets[..., 1].T.double()
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("laid_out", [True, False])
def test_a_weight_is_equal_to_itself_alone(laid_out: bool) -> None:
    weight = decode_layout(packed(torch.randn(16, 64), 4, 32), torch.bfloat16 if laid_out else torch.float32)
    assert weight == weight and weight != weight.map(torch.clone) and len({weight, weight}) == 1


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("group", [16, 48, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_portable_layout_runs_in_every_dtype(bits: int, group: int, dtype: torch.dtype) -> None:
    weight, x = packed(torch.randn(7, 96), bits, group, act_order=True), torch.randn(3, 96, dtype=dtype)
    exact = x.double() @ weight.dequantize(torch.float64).T
    got = quantized_linear(x, weight)
    plain = F.linear(x, weight.dequantize(torch.float64).to(dtype))
    bound = 2 * (plain.double() - exact).abs().max() + 1e-12
    assert got.dtype == dtype and (got.double() - exact).abs().max() <= bound
    reference = quantized_linear(x, weight, backend="reference")
    wide = exact.float() if dtype != torch.float64 else exact
    torch.testing.assert_close(reference, wide.to(dtype), rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", ["portable", "packed"])
@pytest.mark.parametrize("act_order", [True, False])
def test_strided_and_empty_inputs(layout: str, act_order: bool) -> None:
    weight = packed(torch.randn(16, 64), 4, 32, act_order=act_order)
    if layout == "packed":
        weight = decode_layout(weight, torch.bfloat16)
    wide = torch.randn(5, 128).bfloat16()
    for x in (wide[:, ::2], wide[:, 64:], torch.randn(64, 5).bfloat16().T, torch.randn(4, 3, 64).bfloat16().mT.mT[::2]):
        assert torch.equal(quantized_linear(x, weight), quantized_linear(x.contiguous(), weight))
        if layout == "packed":  # what a decode step calls
            assert torch.equal(weight.bound()(x), quantized_linear(x.contiguous(), weight))
    for shape in ((0, 64), (2, 0, 64)):
        out = quantized_linear(torch.zeros(shape).bfloat16(), weight)
        assert out.shape == (*shape[:-1], 16) and out.dtype == torch.bfloat16


def test_the_input_is_left_alone() -> None:
    weight, x = decode_layout(packed(torch.randn(16, 64), 8, 32, act_order=True), torch.bfloat16), torch.randn(2, 64)
    for mine in (x.bfloat16(), x):
        before = mine.clone()
        quantized_linear(mine, weight)
        assert torch.equal(mine, before)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: packed(torch.randn(17, 64), 4, 32), "multiple of 16 output features; the weight has 17"),
        (lambda: packed(torch.randn(16, 64), 4, 16), "groups of 32, 64, 128, 256; the weight has groups of 16"),
        (lambda: packed(torch.randn(16, 96), 4, 96), "the weight has groups of 96"),
        (lambda: packed(torch.randn(16, 64), 3, 32), "the weight has 3"),
        (lambda: packed(torch.randn(16, 64), 2, 32), "the weight has 2"),
        (lambda: in_float32(packed(torch.randn(16, 64), 4, 32)), "bfloat16 scales; the weight's are float32"),
    ],
)
def test_what_the_packed_matmul_cannot_read_stays_portable(make: object, why: str) -> None:
    weight = make()
    assert decode_layout(weight, torch.bfloat16) is weight
    choice = choose_backend("quantized_linear", torch.zeros(1, weight.in_features).bfloat16(), weight)
    assert choice.name == "torch" and "dequantize" in choice.reason and why in choice.reason
    x = torch.randn(2, weight.in_features)
    torch.testing.assert_close(quantized_linear(x, weight), x @ weight.dequantize().T)


def in_float32(weight: PackedWeight) -> PackedWeight:
    return dataclasses.replace(weight, scales=weight.scales.float())


def test_the_choice_says_why_and_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = packed(torch.randn(16, 64), 8, 32)
    laid_out = decode_layout(portable, torch.bfloat16)
    half, full = torch.randn(1, 64).bfloat16(), torch.randn(1, 64)
    for x, weight, says in (
        (half, laid_out, "packed 4-bit matmul, over both halves of the 8 bits"),
        (full, laid_out, "laid out for bfloat16: x is converted"),
        (half, portable, "not laid out for it"),
        (full, portable, "fast in bfloat16 alone, and x is float32"),
    ):
        assert says in choose_backend("quantized_linear", x, weight).reason
    ran = []
    room = sys.modules["labkit.kernels.quantized_linear"]
    monkeypatch.setattr(room, "quantized_linear_reference", lambda x, weight: ran.append(weight) or x)
    quantized_linear(half, laid_out)
    quantized_linear(full, portable, backend="torch")
    assert not ran
    quantized_linear(half, laid_out, backend="reference")
    assert len(ran) == 1 and same(ran[0], portable)


def test_float32_activations_with_a_packed_layout_come_back_as_float32() -> None:
    portable = packed(torch.randn(16, 64), 4, 32)
    x = torch.randn(3, 64)
    got = quantized_linear(x, decode_layout(portable, torch.bfloat16))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x @ portable.dequantize().T, rtol=3e-2, atol=0.3)


def test_backends_by_name() -> None:
    weight, x = packed(torch.randn(16, 64), 4, 32), torch.randn(2, 64)
    expected = (x.double() @ weight.dequantize(torch.float64).T).float()
    for layout in (weight, decode_layout(weight, torch.bfloat16)):
        torch.testing.assert_close(quantized_linear(x, layout, backend="reference"), expected)
    with pytest.raises(BackendUnavailable, match="float16 rightly, and x is float32|it needs Triton's interpreter"):
        quantized_linear(x, weight, backend="triton")
    with pytest.raises(ValueError, match=r"^backend: got 'trion'.*did you mean triton"):
        quantized_linear(x, weight, backend="trion")


@pytest.mark.parametrize(
    ("x", "named"),
    [
        (torch.zeros(2, 63), "x"),
        (torch.zeros(()), "x"),
        (torch.zeros(2, 64, dtype=torch.int64), "x"),
        (torch.zeros(2, 64, device="meta"), "x"),
        ([[0.0] * 64], "x"),
    ],
)
def test_refused_inputs(x: object, named: str) -> None:
    weight = packed(torch.randn(16, 64), 4, 32)
    for layout in (weight, decode_layout(weight, torch.bfloat16)):
        with pytest.raises(ValueError, match=f"^{named}: got"):
            quantized_linear(x, layout)
        with pytest.raises(ValueError, match=f"^{named}: got"):
            choose_backend("quantized_linear", x, layout)
    with pytest.raises(ValueError, match="^weight: got 'Tensor'"):
        quantized_linear(torch.zeros(2, 64), torch.zeros(16, 64))
