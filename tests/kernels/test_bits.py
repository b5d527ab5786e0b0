"""Packed bits: there and back exactly, and every word is what arithmetic on long integers says."""

import pytest
import torch

from labkit.kernels.bits import PACKED_BITS, pack_bits, unpack_bits, words_per_row

LENGTHS = (1, 2, 7, 8, 10, 11, 16, 21, 22, 31, 32, 33, 43, 63, 64, 65, 100, 576)


def words_of(row: list[int], bits: int) -> list[int]:
    """The definition: a row is one long integer, value i shifted by i * bits, cut into words of 32 bits."""
    whole = sum(value << (i * bits) for i, value in enumerate(row))
    count = (len(row) * bits + 31) // 32
    words = [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("length", LENGTHS)
def test_words_are_those_of_a_long_integer_and_come_back(bits: int, length: int) -> None:
    values = torch.randint(0, 1 << bits, (3, length))
    values[0], values[1] = (1 << bits) - 1, 0
    words = pack_bits(values, bits)
    assert words.dtype == torch.int32 and words.is_contiguous()
    assert words.tolist() == [words_of(row, bits) for row in values.tolist()]
    assert words.shape[1] == words_per_row(length, bits) == -(-length * bits // 32)
    back = unpack_bits(words, bits, length)
    assert back.dtype == torch.uint8 and torch.equal(back.long(), values)


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 33), (1, 1), (4, 2, 1, 11), (0, 7), (3, 0), (0, 0), (2, 0, 9)])
def test_shapes(bits: int, shape: tuple[int, ...]) -> None:
    values = torch.randint(0, 1 << bits, shape, dtype=torch.int32)
    words = pack_bits(values, bits)
    assert words.shape == (*shape[:-1], words_per_row(shape[-1], bits))
    assert torch.equal(unpack_bits(words, bits, shape[-1]).int(), values)


@pytest.mark.parametrize(
    ("bits", "values", "words"),
    [
        (2, [1, 2, 3, 0] + [0] * 12 + [2], [0b00111001, 2]),
        # Value 10 of 3 bits takes bits 30, 31 and 32: two in the first word and one in the second.
        (3, [0] * 10 + [0b101] + [0b110], [0b01 << 30, 0b1101]),
        (3, [0] * 21 + [0b011], [0, 1 << 31, 0b01]),
        (4, [0xF, 0x1, 0, 0, 0, 0, 0, 0x8, 0x7], [0x8000001F, 0x7]),
        (8, [0x01, 0x02, 0x03, 0xFF, 0x80], [0xFF030201, 0x80]),
    ],
)
def test_bit_patterns_written_by_hand(bits: int, values: list[int], words: list[int]) -> None:
    signed = [word - (1 << 32) if word >= 1 << 31 else word for word in words]
    assert pack_bits(torch.tensor(values), bits).tolist() == signed
    assert unpack_bits(torch.tensor(signed, dtype=torch.int32), bits, len(values)).tolist() == values


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_packs_alike(dtype: torch.dtype) -> None:
    values = torch.randint(0, 8, (2, 13))
    assert torch.equal(pack_bits(values.to(dtype), 3), pack_bits(values, 3))


def test_strided_values_and_words() -> None:
    wide = torch.randint(0, 8, (66, 4))
    assert torch.equal(pack_bits(wide.T[::2], 3), pack_bits(wide.T[::2].contiguous(), 3))
    words = torch.randint(-(1 << 31), 1 << 31, (4, 6), dtype=torch.int32)
    for bits in PACKED_BITS:
        expected = unpack_bits(words[:, ::2].contiguous(), bits, 12)
        assert torch.equal(unpack_bits(words[:, ::2], bits, 12), expected)


def test_words_past_the_length_are_not_read() -> None:
    words = torch.full((2, 5), -1, dtype=torch.int32)
    assert unpack_bits(words, 3, 11).shape == (2, 11)
    assert unpack_bits(words, 3, 0).shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: pack_bits(torch.tensor([0, 4]), 2), "values"),
        (lambda: pack_bits(torch.tensor([0, 8]), 3), "values"),
        (lambda: pack_bits(torch.tensor([16]), 4), "values"),
        (lambda: pack_bits(torch.tensor([256]), 8), "values"),
        (lambda: pack_bits(torch.tensor([-1, 3]), 4), "values"),
        (lambda: pack_bits(torch.tensor([1.0]), 4), "values"),
        (lambda: pack_bits(torch.tensor([1j]), 4), "values"),
        (lambda: pack_bits(torch.tensor(3), 4), "values"),
        (lambda: pack_bits([1, 2], 4), "values"),
        (lambda: pack_bits(torch.tensor([1]), 5), "bits"),
        (lambda: pack_bits(torch.tensor([1]), 4.0), "bits"),
        (lambda: unpack_bits(torch.zeros(2, dtype=torch.int32), 16, 1), "bits"),
        (lambda: unpack_bits(torch.zeros(2, dtype=torch.int32), 2.0, 1), "bits"),
        (lambda: unpack_bits(torch.zeros(2, dtype=torch.int64), 4, 1), "words"),
        (lambda: unpack_bits(torch.zeros(1, dtype=torch.int32), 3, 11), "words"),
        (lambda: unpack_bits(torch.tensor(1, dtype=torch.int32), 4, 1), "words"),
        (lambda: unpack_bits(torch.zeros(2, dtype=torch.int32), 4, -1), "length"),
    ],
)
def test_refusals(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        call()
