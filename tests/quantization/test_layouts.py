"""Layouts of other software, bit by bit against what their authors document, written out here value by value."""

import dataclasses

import pytest
import torch

from labkit.kernels.bits import pack_bits, unpack_bits
from labkit.kernels.types import PackedWeight
from labkit.quantization.layouts import (
    from_awq,
    from_compressed_tensors,
    from_gptq,
    group_index,
    has_act_order,
    stored_scales,
    to_awq,
    to_compressed_tensors,
    to_gptq,
)


def packed(n: int, k: int, group: int, bits: int = 4, sym: bool = False, act_order: bool = False) -> PackedWeight:
    """Random codes, zero points from 1 up and scales, all different enough that a swapped one shows."""
    top = 1 << bits
    return PackedWeight(
        qweight=pack_bits(torch.randint(0, top, (n, k)), bits),
        scales=(torch.rand(n, k // group) + 0.5).bfloat16(),
        zeros=None if sym else torch.randint(1, top, (n, k // group), dtype=torch.uint8),
        g_idx=(torch.randperm(k) // group).int() if act_order else None,
        bits=bits,
        group_size=group,
        in_features=k,
    )


def same(a: PackedWeight, b: PackedWeight) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(torch.equal(a.tensors[n], b.tensors[n]) for n in a.tensors)


def field(word: int, start: int, bits: int) -> int:
    """`bits` bits of a signed 32-bit word, from bit `start`."""
    return ((word & 0xFFFFFFFF) >> start) & ((1 << bits) - 1)


def bit_stream(words: list[int], position: int, bits: int) -> int:
    """A value of a row of words that is one stream of bits, lowest first, bit by bit."""
    found = 0
    for bit in range(bits):
        place = position * bits + bit
        found |= field(words[place // 32], place % 32, 1) << bit
    return found


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("v1", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), [(24, 64, 32), (8, 32, 16), (32, 48, 48)])
def test_gptq_of_4_bits_is_as_documented(n: int, k: int, group: int, sym: bool, v1: bool) -> None:
    weight = packed(n, k, group, sym=sym)
    q = weight.codes().tolist()
    tensors = to_gptq(weight, weight.scales.half(), v1=v1)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ((k // 8, n), torch.int32),
        "qzeros": ((k // group, n // 8), torch.int32),
        "scales": ((k // group, n), torch.float16),
        "g_idx": ((k,), torch.int32),
    }
    for r, row in enumerate(tensors["qweight"].tolist()):
        for column, word in enumerate(row):
            for i in range(8):
                assert field(word, 4 * i, 4) == q[column][8 * r + i]
    for g, row in enumerate(tensors["qzeros"].tolist()):
        for c, word in enumerate(row):
            for i in range(8):
                z = 8 if sym else int(weight.zeros[8 * c + i, g])
                assert field(word, 4 * i, 4) == (z - 1 if v1 else z)
            assert not sym or word & 0xFFFFFFFF == (0x77777777 if v1 else 0x88888888)
    assert all(
        float(tensors["scales"][g, c]) == float(weight.scales[c, g]) for g in range(k // group) for c in range(n)
    )
    assert tensors["g_idx"].tolist() == [column // group for column in range(k)]


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_gptq_of_other_widths_is_one_stream_along_the_inputs(bits: int) -> None:
    weight = packed(32, 64, 32, bits)
    tensors = to_gptq(weight, weight.scales.half(), v1=False)
    assert tensors["qweight"].shape == (64 * bits // 32, 32) and tensors["qzeros"].shape == (2, 32 * bits // 32)
    q = weight.codes().tolist()
    for column in range(32):
        words = tensors["qweight"][:, column].tolist()
        assert [bit_stream(words, row, bits) for row in range(64)] == q[column]
    for g in range(2):
        words = tensors["qzeros"][g].tolist()
        assert [bit_stream(words, column, bits) for column in range(32)] == weight.zeros[:, g].tolist()


@pytest.mark.parametrize(("bits", "word"), [(2, 0x55555555), (4, 0x77777777), (8, 0x7F7F7F7F)])
def test_symmetric_gptq_v1_stores_the_middle_less_one(bits: int, word: int) -> None:
    tensors = to_gptq(packed(32, 32, 32, bits, sym=True), torch.ones(32, 1).half(), v1=True)
    assert {value & 0xFFFFFFFF for value in tensors["qzeros"].flatten().tolist()} == {word}


def test_gptq_v1_has_no_place_for_a_zero_point_of_0() -> None:
    weight = packed(8, 32, 32)
    weight.zeros[3, 0] = 0
    with pytest.raises(ValueError, match="v1: got True; takes False for a weight with a zero point of 0"):
        to_gptq(weight, weight.scales, v1=True)
    assert same(from_gptq(to_gptq(weight, weight.scales, v1=False), 4, sym=False, v1=False), weight)


def test_act_order_goes_to_g_idx_and_what_it_stands_for_stays() -> None:
    weight = packed(16, 64, 16, act_order=True)
    tensors = to_gptq(weight, weight.scales.half(), v1=False)
    assert torch.equal(tensors["g_idx"], weight.g_idx)
    dense = weight.dequantize()
    for column in range(64):
        g = int(tensors["g_idx"][column])
        for row in range(16):
            q = field(int(tensors["qweight"][column // 8, row]), 4 * (column % 8), 4)
            z = field(int(tensors["qzeros"][g, row // 8]), 4 * (row % 8), 4)
            assert float(dense[row, column]) == (q - z) * float(tensors["scales"][g, row])


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize(("n", "k", "group"), [(24, 64, 32), (8, 16, 16)])
def test_awq_is_as_documented(n: int, k: int, group: int, sym: bool) -> None:
    weight = packed(n, k, group, sym=sym)
    q = weight.codes().tolist()
    tensors = to_awq(weight, weight.scales.half())
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "qweight": ((k, n // 8), torch.int32),
        "qzeros": ((k // group, n // 8), torch.int32),
        "scales": ((k // group, n), torch.float16),
    }
    for column, row in enumerate(tensors["qweight"].tolist()):
        for c, word in enumerate(row):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                assert field(word, 4 * i, 4) == q[8 * c + place][column]
    for g, row in enumerate(tensors["qzeros"].tolist()):
        for c, word in enumerate(row):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                assert field(word, 4 * i, 4) == (8 if sym else int(weight.zeros[8 * c + place, g]))
    assert all(
        float(tensors["scales"][g, c]) == float(weight.scales[c, g]) for g in range(k // group) for c in range(n)
    )


@pytest.mark.parametrize(("n", "bits"), [(12, 4), (16, 8)])
def test_awq_refuses_what_its_words_do_not_hold(n: int, bits: int) -> None:
    weight = packed(n, 16, 16, bits)
    with pytest.raises(ValueError, match=f"weight: got '{n} output features of {bits} bits'; takes a multiple of 8"):
        to_awq(weight, weight.scales)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("n", [24, 13])
def test_compressed_tensors_is_as_documented(bits: int, n: int) -> None:
    weight = packed(n, 48, 16, bits)
    q = weight.codes().tolist()
    tensors = to_compressed_tensors(weight, weight.scales)
    assert tensors["weight_shape"].dtype == torch.int64 and tensors["weight_shape"].tolist() == [n, 48]
    assert tensors["weight_packed"].shape == (n, -(-48 * bits // 32))
    assert (
        tensors["weight_zero_point"].shape == (-(-n * bits // 32), 3) and tensors["weight_zero_point"].is_contiguous()
    )
    middle = 1 << (bits - 1)
    for row, words in enumerate(tensors["weight_packed"].tolist()):
        signed = [value - middle for value in q[row]]
        assert [bit_stream(words, column, bits) - middle for column in range(48)] == signed
    for g in range(3):
        words = tensors["weight_zero_point"][:, g].tolist()
        assert [bit_stream(words, row, bits) for row in range(n)] == weight.zeros[:, g].tolist()
    assert "weight_zero_point" not in to_compressed_tensors(packed(n, 48, 16, bits, sym=True), weight.scales)


@pytest.mark.parametrize("sym", [True, False])
def test_compressed_tensors_packs_as_the_library_does(sym: bool) -> None:
    library = pytest.importorskip(
        "compressed_tensors.compressors.pack_quantized.helpers", reason="compressed-tensors is not installed"
    )
    for bits in (2, 3, 4, 8):
        weight = packed(13, 48, 16, bits, sym)
        tensors = to_compressed_tensors(weight, weight.scales)
        middle = 1 << (bits - 1)
        signed = (weight.codes().int() - middle).to(torch.int8)
        assert torch.equal(tensors["weight_packed"], library.pack_to_int32(signed, bits))
        if not sym:
            zeros = (weight.zeros.int() - middle).to(torch.int8)
            assert torch.equal(tensors["weight_zero_point"], library.pack_to_int32(zeros, bits, packed_dim=0))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_layouts_come_back(bits: int, sym: bool) -> None:
    weight = packed(32, 64, 16, bits, sym)
    for v1 in (True, False):
        tensors = to_gptq(weight, weight.scales, v1=v1)
        assert same(from_gptq(tensors, bits, sym=sym, v1=v1), weight)
    ordered = packed(32, 64, 16, bits, sym, act_order=True)
    assert same(from_gptq(to_gptq(ordered, ordered.scales, v1=False), bits, sym=sym, v1=False), ordered)
    assert same(from_compressed_tensors(to_compressed_tensors(weight, weight.scales), bits), weight)
    if bits == 4:
        explicit = weight if not sym else dataclasses.replace(weight, zeros=torch.full((32, 4), 8, dtype=torch.uint8))
        assert same(from_awq(to_awq(weight, weight.scales)), explicit)


def test_act_order_is_what_is_not_consecutive() -> None:
    weight = packed(8, 64, 16)
    assert group_index(weight).tolist() == [column // 16 for column in range(64)] and not has_act_order(weight)
    in_order = dataclasses.replace(weight, g_idx=group_index(weight))
    assert not has_act_order(in_order)
    swapped = group_index(weight).clone()
    swapped[[0, 63]] = swapped[[63, 0]]
    assert has_act_order(dataclasses.replace(weight, g_idx=swapped))


def with_scales(*scales: float) -> PackedWeight:
    """One row a scale."""
    values = torch.tensor(scales).bfloat16()[:, None]
    return dataclasses.replace(packed(len(scales), 16, 16), scales=values)


def test_scales_that_float16_holds_are_kept_exactly() -> None:
    weight = with_scales(2.0**-17, 1.9921875 * 2**-15, 3e-3, 0.11, 60000.0)
    assert torch.equal(stored_scales("q", weight, torch.float16).float(), weight.scales.float())
    assert stored_scales("q", weight, torch.float16).dtype == torch.float16


def test_a_tiny_scale_beside_ordinary_ones_is_rounded_within_the_bound() -> None:
    weight = with_scales(1e-9, 1.3e-7, 0.01, 0.02, 0.03)
    stored = stored_scales("q", weight, torch.float16).float()
    assert stored[0] == 0 and not torch.equal(stored, weight.scales.float())
    moved = (15 * (stored - weight.scales.float())).abs().max()
    assert 0 < moved <= 0.02 / 64


@pytest.mark.parametrize("scales", [(70000.0, 0.01, 0.01), (1e-7, 1e-7, 1e-7)])
def test_scales_that_float16_cannot_hold_are_refused(scales: tuple[float, ...]) -> None:
    weight = with_scales(*scales)
    with pytest.raises(ValueError, match=r"model: got 'a scale of .* in layers\.0\.q'; takes scales that float16"):
        stored_scales("layers.0.q", weight, torch.float16)
    assert torch.equal(stored_scales("q", weight, torch.bfloat16), weight.scales)


def test_unpacking_here_and_there_agree() -> None:
    """The helper of these tests reads what the package's own reader does, so that neither hides the other's error."""
    words = pack_bits(torch.randint(0, 8, (1, 40)), 3)
    assert unpack_bits(words, 3, 40)[0].tolist() == [bit_stream(words[0].tolist(), i, 3) for i in range(40)]
