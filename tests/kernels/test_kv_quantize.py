"""kv_quantize: what its codes stand for, the same bytes from every backend, and what they do with odd input."""

import dataclasses

import pytest
import torch

from labkit.kernels import BackendUnavailable, QuantizedKV, choose_backend, kv_quantize
from labkit.kernels.kv_types import KV_BITS

SHAPES = [((2, 1, 64, 64), 32, 32), ((1, 1, 48, 128), 16, 64), ((1, 2, 40, 16), 8, 16), ((1, 1, 60, 80), 20, 10)]


def backends() -> list[str]:
    return ["reference", "torch"] if torch.cuda.is_available() else ["reference", "torch", "triton"]


def quantize(x: torch.Tensor, bits: int, group: int, axis: str, backend: str, **options: object) -> QuantizedKV:
    """By the kernel where it can be."""
    try:
        return kv_quantize(x, bits=bits, group_size=group, axis=axis, backend=backend, **options)
    except BackendUnavailable as error:
        assert "a power of two" in str(error)
        return kv_quantize(x, bits=bits, group_size=group, axis=axis, backend="torch", **options)


def codes_by_hand(kv: QuantizedKV) -> torch.Tensor:
    """Word j, of two bytes, holds channel j in its lowest bits, then j + head_dim * bits / 16, and so on."""
    width, fields = kv.codes.shape[3] // 2, 16 // kv.bits
    codes = torch.empty(*kv.codes.shape[:3], width * fields, dtype=torch.int64)
    for channel in range(width * fields):
        low, high = (kv.codes[..., 2 * (channel % width) + byte].long() for byte in (0, 1))
        codes[..., channel] = (low + 256 * high) // (1 << (kv.bits * (channel // width))) % (1 << kv.bits)
    return codes


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("shape", "by_channel", "by_token"), SHAPES)
def test_what_the_codes_stand_for(bits: int, axis: str, shape: tuple, by_channel: int, by_token: int) -> None:
    """Each number within half a step of its group, and half a rounding at the ends; groups reach their minimum."""
    group = by_channel if axis == "channel" else by_token
    x = torch.randn(shape).half()
    dim = 2 if axis == "channel" else 3
    grouped = x.double().unflatten(dim, (-1, group))
    low, high = grouped.amin(dim + 1), grouped.amax(dim + 1)
    for backend in backends():
        kv = quantize(x, bits, group, axis, backend)
        assert kv.bits == bits and kv.shape == shape and kv.recent is None and kv.scales.dtype == torch.float16
        assert kv.codes.nbytes == x.numel() * bits // 8 and kv.nbytes == sum(t.nbytes for t in kv.tensors.values())
        torch.testing.assert_close(kv.minimums.double(), low, rtol=0, atol=0)
        torch.testing.assert_close(kv.scales.double(), (high - low) / (2**bits - 1), rtol=2**-11, atol=2**-24)
        codes = codes_by_hand(kv).double().unflatten(dim, (-1, group))
        scales, minimums = (t.double().unsqueeze(dim + 1) for t in (kv.scales, kv.minimums))
        meant = (codes * scales + minimums).flatten(dim, dim + 1)
        torch.testing.assert_close(kv.dequantize(torch.float64), meant, rtol=0, atol=0)
        # The rounded scale may end below the largest number by its own rounding, 2^bits - 1 times.
        most = (scales * (0.5 + (2**bits - 1) * 2**-11)).expand_as(grouped).flatten(dim, dim + 1) + 1e-9
        assert ((meant - x.double()).abs() <= most).all()


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("shape", "by_channel", "by_token"), SHAPES)
def test_the_same_bytes_from_every_backend(
    bits: int, axis: str, dtype: torch.dtype, shape: tuple, by_channel: int, by_token: int
) -> None:
    groups = (by_channel, shape[2]) if axis == "channel" else (by_token, shape[3], 4)
    x = (torch.randn(shape) * 3).to(dtype)
    x[:, :, : shape[2] // 2, : shape[3] // 2] = 1.75
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.zeros(*shape[:2], shape[2] + 3, shape[3] + 1).to(dtype)[:, :, 3:, 1:]
    sliced.copy_(x)
    every_other = torch.zeros(*shape[:3], 2 * shape[3]).to(dtype)[..., ::2]
    every_other.copy_(x)
    for group in groups:
        # Triton's interpreter cuts bfloat16 off where it should round, so that scales are kept in another dtype.
        options = {"scales_dtype": torch.float16 if dtype == torch.float16 else torch.float32}
        known = quantize(x, bits, group, axis, "reference", **options)
        for backend in backends()[1:]:
            for y in (strided, sliced, every_other) if backend == "torch" else (sliced, every_other):
                kv = quantize(y, bits, group, axis, backend, **options)
                assert all(torch.equal(kv.tensors[name], known.tensors[name]) for name in known.tensors)


def test_halves_round_to_even_in_every_backend() -> None:
    """Numbers halfway between two codes, at steps whose reciprocal is no float: only a true division finds them."""
    steps = torch.arange(3, 195, 6).float()
    halves = torch.arange(16) + 0.5
    halves[-2:] = torch.tensor([0.0, 255.0])
    for backend in backends():
        for axis, x in (("channel", halves[:, None] * steps), ("token", steps[:, None] * halves)):
            kv = kv_quantize(
                x[None, None], bits=8, group_size=16, axis=axis, scales_dtype=torch.float32, backend=backend
            )
            assert torch.equal(kv.scales.flatten(), steps) and not kv.minimums.any()
            codes = codes_by_hand(kv)[0, 0] if axis == "channel" else codes_by_hand(kv)[0, 0].T
            expected = torch.tensor([round(half) for half in halves.tolist()])
            assert torch.equal(codes, expected[:, None].expand(16, 32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares the bytes of the compiled kernel")
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_scales_of_bfloat16_in_the_interpreter(axis: str) -> None:
    """The interpreter cuts float32 off to bfloat16, where a GPU rounds: the scales are the reference's, cut off, and
    the codes those that belong to them. Minimums of bfloat16 are exact either way."""
    x = torch.randn(2, 1, 32, 64).bfloat16()
    kv, exact = (
        kv_quantize(x, bits=4, group_size=16, axis=axis, backend="triton", scales_dtype=d)
        for d in (None, torch.float32)
    )
    assert torch.equal(kv.minimums.float(), exact.minimums)
    cut = (exact.scales.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert kv.scales.dtype == torch.bfloat16 and torch.equal(kv.scales.float(), cut)
    dim = 2 if axis == "channel" else 3
    grouped = x.float().unflatten(dim, (-1, 16))
    best = (grouped - kv.minimums.float().unsqueeze(dim + 1)) / kv.scales.float().unsqueeze(dim + 1)
    best = best.nan_to_num(0.0).clamp(0, 15).round().flatten(dim, dim + 1)
    assert torch.equal(codes_by_hand(kv).float(), best)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_constant_groups_come_back_exactly(axis: str) -> None:
    x = torch.randn(2, 2, 1, 1).half().expand(2, 2, 32, 64)
    for backend in backends():
        for bits in KV_BITS:
            kv = quantize(x, bits, 16, axis, backend)
            assert not kv.scales.any() and not kv.codes.any() and torch.equal(kv.dequantize(torch.float16), x)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_spoil_their_group_and_no_other(axis: str, value: float) -> None:
    x = torch.randn(2, 2, 32, 64).half()
    x[1, 0, 17, 33] = value
    spoilt = torch.zeros(x.shape, dtype=torch.bool)
    if axis == "channel":
        spoilt[1, 0, 16:, 33] = True
    else:
        spoilt[1, 0, 17, 32:48] = True
    for backend in backends():
        assert torch.equal(quantize(x, 4, 16, axis, backend).dequantize().isnan(), spoilt)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_empty_input(axis: str) -> None:
    for shape in ((0, 2, 32, 64), (2, 2, 0, 64)):
        for backend in backends():
            kv = quantize(torch.zeros(shape).half(), 4, 16, axis, backend)
            assert kv.shape == shape and kv.dequantize().shape == shape


def test_the_dtype_of_scales() -> None:
    x = torch.randn(1, 1, 32, 64)
    for dtype, found in ((torch.float32, torch.bfloat16), (torch.bfloat16,) * 2, (torch.float16,) * 2):
        assert kv_quantize(x.to(dtype), bits=4, group_size=16, axis="token").scales.dtype == found
    kv = kv_quantize(x, bits=4, group_size=16, axis="token", scales_dtype=torch.float32)
    assert kv.minimums.dtype == torch.float32
    # Codes are chosen for the rounded grid: with an unrounded one, numbers far from zero would be off by steps.
    far = x * 0.01 + 100
    kv = kv_quantize(far, bits=8, group_size=32, axis="channel", scales_dtype=torch.bfloat16)
    grid = (kv.scales.double()[:, :, 0, None], kv.minimums.double()[:, :, 0, None])
    best = ((far.double() - grid[1]) / grid[0]).clamp(0, 255).round() * grid[0] + grid[1]
    torch.testing.assert_close(kv.dequantize(torch.float64), best, rtol=0, atol=1e-6)


def test_packing_is_exact() -> None:
    """All bytes, read back; a code of each channel alone."""
    for bits in KV_BITS:
        codes = torch.randint(0, 1 << bits, (1, 2, 16, 64))
        kv = kv_quantize(codes.half(), bits=bits, group_size=16, axis="channel")
        assert torch.equal(codes_by_hand(kv).double() * kv.scales.double() + kv.minimums, kv.dequantize(torch.float64))


WRONG = {
    "bits": ({"bits": 3}, "bits: got 3; takes one of 8, 4, 2"),
    "axis": ({"axis": "head"}, "axis: got 'head'"),
    "group": ({"group_size": 24}, "group_size: got 24; takes a divisor of length, 32, for axis 'channel'"),
    "no group": ({"group_size": 0}, "group_size: got 0"),
    "backend": ({"backend": "cuda"}, "backend: got 'cuda'"),
    "scales": ({"scales_dtype": torch.float64}, "scales_dtype: got torch.float64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    change, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        kv_quantize(torch.zeros(1, 1, 32, 64), **{"bits": 4, "group_size": 16, "axis": "channel"} | change)


def test_wrong_tensors() -> None:
    for x in (torch.zeros(1, 32, 64), torch.zeros(1, 1, 32, 64).double(), torch.zeros(1, 1, 32, 64).int()):
        with pytest.raises(ValueError, match="x: got"):
            kv_quantize(x, bits=4, group_size=16, axis="channel")
    with pytest.raises(ValueError, match="head_dim: got 6; takes a multiple of 8 at 2 bits"):
        kv_quantize(torch.zeros(1, 1, 32, 6), bits=2, group_size=2, axis="token")


KV_FIELDS = {
    "codes": (lambda kv: {"codes": kv.codes.int()}, "codes: got 'torch.int32"),
    "scales": (
        lambda kv: {"scales": kv.scales[:, :, :1]},
        r"scales: got 'shape \(2, 2, 1, 64\)'; takes \(2, 2, 2, 64\)",
    ),
    "dtype": (lambda kv: {"minimums": kv.minimums.float()}, "minimums: got torch.float32; takes the dtype of scales"),
    "recent": (lambda kv: {"recent": torch.zeros(2, 2, 5, 64)}, "recent, n_quantized: got 'one of them"),
    "room": (
        lambda kv: {"recent": torch.zeros(2, 3, 5, 64), "n_quantized": torch.zeros(2, dtype=torch.int32)},
        r"recent: got 'shape \(2, 3, 5, 64\)'; takes \(batch, 2, room, 64\)",
    ),
    "rows": (
        lambda kv: {"recent": torch.zeros(2, 2, 5, 64), "n_quantized": torch.zeros(3, dtype=torch.int32)},
        "n_quantized: got '3 rows'; takes 2",
    ),
    "counts": (
        lambda kv: {"recent": torch.zeros(2, 2, 5, 64), "n_quantized": torch.zeros(2)},
        "n_quantized: got 'torch.float32",
    ),
}


@pytest.mark.parametrize("name", KV_FIELDS)
def test_what_a_quantized_kv_refuses_to_be_made_of(name: str) -> None:
    kv = kv_quantize(torch.randn(2, 2, 32, 64).half(), bits=4, group_size=16, axis="channel")
    change, says = KV_FIELDS[name]
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(kv, **change(kv))


def test_the_choice_and_its_reason() -> None:
    x = torch.randn(1, 1, 32, 80).half()
    if not torch.cuda.is_available():
        choice = choose_backend("kv_quantize", x)
        assert choice.name == "torch" and "backend='triton' alone" in choice.reason
        with pytest.raises(BackendUnavailable, match="kv_quantize: backend 'triton' cannot run: by token it takes"):
            kv_quantize(x, bits=4, group_size=16, axis="token", backend="triton")
        with pytest.raises(BackendUnavailable, match="does not fit into registers"):
            kv_quantize(x.repeat(1, 1, 64, 1), bits=4, group_size=2048, axis="channel", backend="triton")
