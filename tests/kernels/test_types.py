"""PackedWeight: what its integers stand for, and what it refuses to be made of."""

import dataclasses

import pytest
import torch

from labkit.kernels import PackedWeight
from labkit.kernels.bits import PACKED_BITS, pack_bits, words_per_row

OUT, IN, GROUP = 5, 48, 16


def random_weight(
    bits: int, *, sym: bool = False, act_order: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight of random content, and its codes."""
    codes = torch.randint(0, 1 << bits, (OUT, IN))
    weight = PackedWeight(
        qweight=pack_bits(codes, bits),
        scales=(torch.rand(OUT, IN // GROUP) + 0.1).to(dtype),
        zeros=None if sym else torch.randint(0, 1 << bits, (OUT, IN // GROUP), dtype=torch.uint8),
        g_idx=(torch.randperm(IN) // GROUP).int() if act_order else None,
        bits=bits,
        group_size=GROUP,
        in_features=IN,
    )
    return weight, codes


def by_hand(weight: PackedWeight, codes: torch.Tensor) -> torch.Tensor:
    """w[n, k] = (q[n, k] - z[n, g]) * s[n, g], one at a time, in float64."""
    full = torch.empty(OUT, IN, dtype=torch.float64)
    for n in range(OUT):
        for k in range(IN):
            g = k // GROUP if weight.g_idx is None else int(weight.g_idx[k])
            z = 2 ** (weight.bits - 1) if weight.zeros is None else int(weight.zeros[n, g])
            full[n, k] = (int(codes[n, k]) - z) * float(weight.scales[n, g])
    return full


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32])
def test_dequantize_is_the_formula(bits: int, sym: bool, act_order: bool, scales: torch.dtype) -> None:
    weight, codes = random_weight(bits, sym=sym, act_order=act_order, dtype=scales)
    expected = by_hand(weight, codes)
    assert torch.equal(weight.codes().long(), codes)
    double = weight.dequantize(torch.float64)
    assert double.dtype == torch.float64 and torch.equal(double, expected)
    assert torch.equal(weight.dequantize(), expected.float())
    if scales == torch.bfloat16:
        # Codes of up to 8 bits and scales are exact in bfloat16: only the product is rounded.
        assert torch.equal(weight.dequantize(torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("act_order", [True, False])
def test_dequantize_leaves_the_tensors_alone(act_order: bool) -> None:
    weight, _ = random_weight(4, act_order=act_order, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in weight.tensors.items()}
    first = weight.dequantize().mul_(2)
    assert torch.equal(weight.dequantize() * 2, first)
    assert all(torch.equal(weight.tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_nbytes_are_the_tensors(bits: int, sym: bool, act_order: bool) -> None:
    weight, _ = random_weight(bits, sym=sym, act_order=act_order)
    groups = OUT * IN // GROUP
    expected = 4 * OUT * words_per_row(IN, bits) + 2 * groups + (0 if sym else groups) + (4 * IN if act_order else 0)
    assert weight.nbytes == expected
    assert set(weight.tensors) == {"qweight", "scales"} | ({"zeros"} - ({"zeros"} if sym else set())) | (
        {"g_idx"} if act_order else set()
    )
    assert weight.out_features == OUT and weight.device == torch.device("cpu")


def test_a_weight_is_equal_to_itself_alone() -> None:
    """Compared field by field, two tensors would be asked for one truth value."""
    weight, _ = random_weight(4, act_order=True)
    assert weight == weight and weight != weight.map(torch.clone)
    assert len({weight, weight, weight.map(torch.clone)}) == 2


def test_map_changes_every_tensor_and_nothing_else() -> None:
    weight, _ = random_weight(3, act_order=True)
    seen = []
    copy = weight.map(lambda tensor: seen.append(tensor) or tensor.clone())
    assert len(seen) == 4
    for name, tensor in weight.tensors.items():
        assert torch.equal(copy.tensors[name], tensor) and copy.tensors[name].data_ptr() != tensor.data_ptr()
    assert (copy.bits, copy.group_size, copy.in_features) == (3, GROUP, IN)


def test_by_column_gives_each_column_its_group() -> None:
    weight, _ = random_weight(4, act_order=True)
    values = torch.arange(OUT * IN // GROUP).view(OUT, -1)
    wide = weight.by_column(values)
    assert all(wide[n, k] == values[n, weight.g_idx[k]] for n in range(OUT) for k in range(IN))
    plain, _ = random_weight(4)
    assert all(plain.by_column(values)[n, k] == values[n, k // GROUP] for n in range(OUT) for k in range(IN))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 5),
        ("bits", 4.0),
        ("bits", True),
        ("group_size", 0),
        ("group_size", -1),
        ("group_size", 32),
        ("qweight", torch.zeros(OUT, 5, dtype=torch.int32)),
        ("qweight", torch.zeros(OUT + 1, 6, dtype=torch.int32)),
        ("qweight", torch.zeros(OUT, 6, dtype=torch.int64)),
        ("qweight", torch.zeros(OUT * 6, dtype=torch.int32)),
        ("scales", torch.ones(OUT, 2)),
        ("scales", torch.ones(OUT, 3, dtype=torch.float64)),
        ("scales", torch.ones(OUT * 3)),
        ("zeros", torch.zeros(OUT, 3)),
        ("zeros", torch.zeros(OUT, 2, dtype=torch.uint8)),
        ("g_idx", torch.zeros(IN, dtype=torch.int64)),
        ("g_idx", torch.zeros(IN - 1, dtype=torch.int32)),
        ("g_idx", torch.zeros(1, IN, dtype=torch.int32)),
    ],
)
def test_refusals(field: str, value: object) -> None:
    weight, _ = random_weight(4, act_order=True)
    with pytest.raises(ValueError, match=f"^{field}: got"):
        dataclasses.replace(weight, **{field: value})
