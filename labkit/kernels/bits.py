"""Small integers packed into 32-bit words, so that they take no more memory than their bits.

A row is one stream of bits: value i takes bits `i * bits` to `(i + 1) * bits`, lowest first, over words in order; with
3 bits a value may lie across two words. That is GPTQ's order, and that of compressed-tensors for 2, 4 and 8 bits.
"""

import torch
import torch.nn.functional as F

from labkit import _check

PACKED_BITS = (2, 3, 4, 8)
# At every width 8 values take a whole number of bytes, and 32 as many words as a value has bits.
_BYTES_OF, _WORDS_OF = 8, 32


def words_per_row(length: int, bits: int) -> int:
    """32-bit words that `length` values of `bits` bits take; the last one may be filled in part."""
    return -(-length * bits // 32)


def pack_bits(values: torch.Tensor, bits: int) -> torch.Tensor:
    """`values (..., n)`, integers from 0 to 2^bits - 1, to int32 words `(..., ceil(n * bits / 32))`.

    Errors: ValueError for another number of bits, for values out of range and for anything but integers.
    """
    _check.choice("bits", _check.integer("bits", bits), PACKED_BITS)
    _check.tensor("values", values)
    whole = not values.is_floating_point() and not values.is_complex() and values.ndim > 0
    _check.require(whole, "values", f"{values.dtype} of {values.ndim} dimensions", "integers of at least one dimension")
    if values.numel():
        low, high = (int(value) for value in values.aminmax())
        _check.require(low >= 0 and high < 1 << bits, "values", f"{low} to {high}", f"0 to {(1 << bits) - 1}")
    length = values.shape[-1]
    padded = F.pad(values.to(torch.uint8), (0, -length % _WORDS_OF))
    stream = _bytes_of(padded.unflatten(-1, (-1, _BYTES_OF)), bits).flatten(-2)
    words = values.new_empty((*values.shape[:-1], words_per_row(length, bits)), dtype=torch.int32)
    words.view(torch.uint8).copy_(stream[..., : 4 * words.shape[-1]])
    return words


def _bytes_of(eights: torch.Tensor, bits: int) -> torch.Tensor:
    """`(..., 8)` values to `(..., bits)` bytes."""
    if bits == 8:
        return eights
    if bits == 3:
        shifts = torch.arange(0, 24, 3, device=eights.device, dtype=torch.int32)
        whole = (eights.int() << shifts).sum(-1, dtype=torch.int32)
        return torch.stack([(whole >> shift) & 0xFF for shift in (0, 8, 16)], dim=-1).to(torch.uint8)
    fields = eights.unflatten(-1, (bits, 8 // bits))
    shifts = torch.arange(0, 8, bits, device=eights.device, dtype=torch.uint8)
    return (fields << shifts).sum(-1, dtype=torch.uint8)


def unpack_bits(words: torch.Tensor, bits: int, length: int) -> torch.Tensor:
    """The first `length` values of each row of `words (..., n_words)`, uint8 `(..., length)`.

    Errors: ValueError for words that are too few or no int32.
    """
    _check.choice("bits", _check.integer("bits", bits), PACKED_BITS)
    _check.integer("length", length, 0)
    _check.tensor("words", words, dtypes=(torch.int32,))
    enough = words.ndim > 0 and words.shape[-1] >= words_per_row(length, bits)
    takes = f"at least {words_per_row(length, bits)} words a row for {length} values of {bits} bits"
    _check.require(enough, "words", f"shape {tuple(words.shape)}", takes)
    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream[..., :length]
    if bits == 3:
        return _unpack_threes(stream)[..., :length]
    mask = (1 << bits) - 1
    fields = [(stream >> shift) & mask for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=-1).flatten(-2)[..., :length]


def _unpack_threes(stream: torch.Tensor) -> torch.Tensor:
    """3-bit values of a stream of bytes: eight lie in each three bytes."""
    triples = F.pad(stream, (0, -stream.shape[-1] % 3)).unflatten(-1, (-1, 3)).int()
    whole = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    return torch.stack([((whole >> shift) & 7).to(torch.uint8) for shift in range(0, 24, 3)], dim=-1).flatten(-2)
