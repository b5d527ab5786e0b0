"""Exercise `pack_row`: a row quantized in groups and packed into int32 words, so that its bytes are really gone.

Tested by what the words give back: the check unpacks them, lowest bits first, and dequantizes with the scales and
zeros that come with them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.exercises._exercise import Answer, Exercise, Failed, expect, near, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "pack_row(weight_row, bits, group_size) -> (words, scales, zeros)"
_OWN = (
    "quantization/primitives",
    "quantization/packing",
    "quantization/rtn",
    "quantization/linear",
    "quantization/api",
    "kernels/types",
    "kernels/bits",
)


@dataclass(frozen=True)
class _Packed:
    """`codes (in_features,)` int64; `scales` and `zeros (groups,)` float64; `rounding`: what the scales' own dtype
    may add to the error of a weight, in steps."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    rounding: float


def _unpack(words: Tensor, bits: int) -> Tensor:
    """(words,) to (words * 32 / bits,): the code in the lowest bits first."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[:, None] >> shifts) & (2**bits - 1)).flatten()


def _checked_words(words: object, n: int, bits: int) -> Tensor:
    expect(isinstance(words, Tensor), f"words should be a torch tensor; got {type(words).__name__}")
    expect(words.ndim == 1, f"words should have one dimension; got the shape {tuple(words.shape)}")
    target, found = n * bits // 8, words.numel() * words.element_size()
    saved = f"{n} weights of {bits} bits take {target} bytes; your {words.numel()} words of {words.dtype} take {found}"
    expect(found == target, f"{saved}: {32 // bits} codes go into one int32 word")
    expect(words.dtype == torch.int32, f"words should be torch.int32; got {words.dtype}")
    return words.detach().cpu()


def _run(answer: Answer, what: str, row: Tensor, bits: int, group_size: int) -> _Packed:
    """Call it, and see that what comes back has the right form: bytes, groups, zeros that can be stored."""
    value = without_labkit(lambda: answer(row.clone(), bits, group_size), _OWN)
    triple = isinstance(value, tuple | list) and len(value) == 3
    expect(triple, f"return three tensors, (words, scales, zeros); got {type(value).__name__}")
    words, (scales, zeros) = _checked_words(value[0], row.numel(), bits), value[1:]
    groups = row.numel() // group_size
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        expect(isinstance(tensor, Tensor), f"{name} should be a torch tensor; got {type(tensor).__name__}")
        each = f"{name} should hold one value for each group: {groups} for {row.numel()} weights in groups of"
        expect(tensor.numel() == groups, f"{each} {group_size}; got {tensor.numel()}")
    expect(scales.is_floating_point(), f"scales should be floating point; got {scales.dtype}")
    rounding = 2**bits * torch.finfo(scales.dtype).eps
    scales, zeros = (
        as_tensor(t.reshape(-1), (groups,), f"{what}: {name}") for t, name in ((scales, "scales"), (zeros, "zeros"))
    )
    return _Packed(_unpack(words, bits), scales, zeros, rounding)


def _expect_order(codes: Tensor, target: Tensor, bits: int) -> None:
    """Fail unless the codes are those wanted, naming the usual mistake that they show."""
    if torch.equal(codes, target):
        return
    per_word = 32 // bits
    halved = target.reshape(-1, per_word).clone()
    halved[:, -1] &= 2 ** (bits - 1) - 1
    mistakes = {
        "the first weight of each word sits in the highest bits": target.reshape(-1, per_word).flip(1).flatten(),
        "a word holds weights that lie far apart": target.reshape(per_word, -1).T.flatten(),
        "the last weight of the row comes first": target.flip(0),
        "the highest bit of each word is lost; with it the int32 is negative, which is right": halved.flatten(),
    }
    place = int((codes != target).nonzero()[0])
    other = f"code {place} reads as {int(codes[place])}, and should be {int(target[place])}"
    why = next((text for text, wrong in mistakes.items() if torch.equal(codes, wrong)), other)
    wanted = f"the lowest {bits} bits of word 0 should hold weight 0, the next {bits} weight 1, and so on"
    raise Failed(f"packing at {bits} bits: {wanted}; in yours {why}")


def _test_known_row(answer: Answer, bits: int) -> None:
    """Weights that are the whole numbers of the range: the step is 1, zero is 0, and each code is its weight."""
    top = 2**bits - 1
    target = torch.tensor([[i, top - i] for i in range(8)]).flatten()
    packed = _run(answer, f"weights from 0 to {top}", target.float(), bits, 16)
    scale, zero = float(packed.scales[0]), float(packed.zeros[0])
    given = f"weights from 0 to {top} at {bits} bits have"
    steps = f"2^bits codes have {top} steps between them: divide by 2^bits - 1"
    expect(not near(scale, top / 2**bits, 1e-3), f"{given} a scale of 1, yours is {scale:.4g}: {steps}")
    expect(near(scale, 1.0, 1e-3), f"{given} a scale of 1, (max - min) / (2^bits - 1); yours is {scale:.4g}")
    expect(zero == 0, f"{given} a zero of 0, round(-min / scale); yours is {zero:g}")
    _expect_order(packed.codes, target, bits)


def _test_round_trip(answer: Answer, what: str, row: Tensor, bits: int, group_size: int) -> None:
    """Each weight comes back within half a step of the range that its group spans, zero included."""
    packed = _run(answer, what, row, bits, group_size)
    groups = row.double().reshape(-1, group_size)
    steps = (groups.amax(1).clamp(min=0) - groups.amin(1).clamp(max=0)) / (2**bits - 1)
    outside = packed.zeros[(packed.zeros < 0) | (packed.zeros > 2**bits - 1)]
    stored = f"zero should lie in 0 to {2**bits - 1}, so that {bits} bits hold it: widen the range to hold 0 first"
    expect(outside.numel() == 0, f"{what}: {stored}; got {outside[:1].sum():g}")
    whole = torch.equal(packed.zeros, packed.zeros.round())
    expect(whole, f"{what}: zero should be a whole number, so that a weight of 0 comes back as 0")
    back = (packed.codes.reshape(groups.shape) - packed.zeros[:, None]) * packed.scales[:, None]
    error = ((back - groups).abs() / steps.clamp(min=1e-30)[:, None]).amax(1)
    worst = int(error.argmax())
    limit = 0.5 + 1e-3 + packed.rounding
    allowed = f"{what}: a weight should come back within half a step, (max - min) / (2^bits - 1) of its own group"
    found = f"one of group {worst} (of {len(groups)}) is {error[worst]:.3g} steps away"
    same = len(groups) > 1 and near(float(packed.scales.max()), float(packed.scales.min()))
    why = ". All scales are equal: is the range taken over the whole row?" if same else ""
    expect(float(error[worst]) <= limit, f"{allowed}; {found}{why}")


def _test_rows(answer: Answer, bits: int) -> None:
    uneven = normal(bits, 8, 16) * torch.logspace(-2, 1, 8)[:, None]
    _test_round_trip(answer, f"groups of very different size at {bits} bits", uneven.flatten(), bits, 16)
    # The ends of the range lie half-way between two codes, and both round up (to even).
    top, low = 2**bits - 1, 3.5
    edge = torch.cat([normal(1, 14), torch.tensor([-low, top - low])]) / 8
    clamped = f"a largest weight that rounds to code {top + 1} at {bits} bits (clamp the codes to 0 to {top})"
    _test_round_trip(answer, clamped, edge.flip(0), bits, 16)
    one_sided = torch.cat([normal(2, 16).abs() + 1, -normal(3, 16).abs() - 1, torch.full((16,), 0.3)])
    _test_round_trip(answer, f"groups on one side of zero at {bits} bits", one_sided, bits, 16)
    zeros = torch.cat([torch.zeros(16), normal(4, 16)])
    _test_round_trip(answer, f"a group of zeros beside another at {bits} bits (a scale of 0 divides)", zeros, bits, 16)
    _test_round_trip(answer, f"groups of 64 at {bits} bits", normal(5, 192) * 0.02, bits, 64)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    for bits in (4, 8):
        _test_known_row(answer, bits)
        _test_rows(answer, bits)
    return "each weight comes back within half a step, from words that take 1/2 byte a weight at 4 bits and 1 at 8"


PACK_ROW = Exercise(
    name="pack_row",
    chapter=2,
    task="Quantize one row in groups, with a scale and a zero for each, and pack the codes into int32 words.",
    signature=_SIGNATURE,
    hints=(
        "Reshape the row to (groups, group_size): each group has its own smallest and largest weight, and its own "
        "step. What is the step of a group that holds only zeros?",
        "low = min(smallest, 0), high = max(largest, 0); scale = (high - low) / (2**bits - 1), replaced where it is 0; "
        "zero = round(-low / scale); codes = clamp(round(w / scale) + zero, 0, 2**bits - 1).",
        "Codes as int64, reshaped to (-1, 32 // bits), shifted left by torch.arange(0, 32, bits), summed over the last "
        "dimension, then .to(torch.int32): a sum past 2**31 wraps to a negative word, which holds the same bits.",
    ),
    test=_test,
)
