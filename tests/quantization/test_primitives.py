"""The grid: what its ends are, what its scales are stored as, and that every weight goes to its nearest point."""

import pytest
import torch

from labkit.kernels.bits import PACKED_BITS
from labkit.quantization.primitives import Grid, check_format, group_length, minmax_grid, stored_scales


def nearest(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The distance of each weight to the nearest of the grid's points, by trying all of them."""
    points = torch.arange(grid.top + 1).float()[:, None, None]
    values = (points - grid.zeros) * grid.scales
    return (weight[None] - values[..., None]).abs().amin(0)


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("shift", [0.0, 0.5, 5.0, -5.0])
def test_every_weight_goes_to_the_nearest_point(bits: int, sym: bool, shift: float) -> None:
    weight = torch.randn(6, 3, 16) + shift
    grid = minmax_grid(weight, bits, sym)
    codes = grid.encode(weight)
    assert torch.equal(codes, codes.round()) and codes.min() >= 0 and codes.max() <= grid.top
    error = (grid.decode(codes) - weight).abs()
    torch.testing.assert_close(error, nearest(weight, grid), rtol=1e-4, atol=1e-5)
    # Half a step. The end of a symmetric grid that lacks its last point, and a rounded zero point, cost as much again.
    steps = grid.scales[..., None] * (1.0 if bits > 2 or not sym else 1.5)
    assert (error <= steps * (1 + 1e-3)).all()


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_the_ends_and_the_zero_point(bits: int) -> None:
    weight = torch.tensor([[[-1.0, 0.0, 0.25, 2.0]]])
    top = (1 << bits) - 1
    grid = minmax_grid(weight, bits, sym=False)
    assert grid.scales.item() == pytest.approx(3 / top, rel=2**-7) and grid.scales.item() >= 3 / top
    assert grid.zeros.item() == round(1 / grid.scales.item())
    symmetric = minmax_grid(weight, bits, sym=True)
    assert symmetric.scales.item() == pytest.approx(4 / top, rel=2**-7) and symmetric.zeros.item() == 1 << (bits - 1)


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("sym", [True, False])
def test_zero_stays_exact(bits: int, sym: bool) -> None:
    weight = torch.rand(4, 2, 16) + 0.5
    weight[:, :, 3] = 0.0
    for signed in (weight, -weight):
        grid = minmax_grid(signed, bits, sym)
        assert (grid.decode(grid.encode(signed))[:, :, 3] == 0).all()


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_positive_and_negative_groups_use_the_whole_grid(bits: int) -> None:
    weight = torch.rand(4, 2, 64) + 1.0
    positive, negative = minmax_grid(weight, bits, sym=False), minmax_grid(-weight, bits, sym=False)
    # A scale is rounded up by less than 1 in 128: of 255 steps two may be left over.
    spare = 2 if bits == 8 else 0
    assert (positive.zeros == 0).all() and (negative.zeros >= negative.top - spare).all()
    assert (positive.encode(weight).amax(-1) >= positive.top - spare).all()
    assert (negative.encode(-weight).amin(-1) == 0).all()


@pytest.mark.parametrize("sym", [True, False])
def test_a_group_of_zeros(sym: bool) -> None:
    grid = minmax_grid(torch.zeros(2, 3, 16), 4, sym)
    assert (grid.scales == 1).all() and (grid.decode(grid.encode(torch.zeros(2, 3, 16))) == 0).all()


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-5, 1e5, 1e30])
@pytest.mark.parametrize("sym", [True, False])
def test_extreme_magnitudes_stay_finite(size: float, sym: bool) -> None:
    weight = torch.randn(3, 2, 32) * size
    grid = minmax_grid(weight, 4, sym)
    decoded = grid.decode(grid.encode(weight))
    assert decoded.isfinite().all() and grid.zeros.isfinite().all()
    assert ((decoded - weight).abs() <= 1.01 * grid.scales[..., None]).all()


def test_scales_are_stored_as_bfloat16_rounded_up() -> None:
    scales = torch.rand(1000) * torch.logspace(-20, 20, 1000)
    stored = stored_scales(scales)
    assert stored.dtype == torch.float32 and torch.equal(stored.bfloat16().float(), stored)
    assert (stored >= scales).all() and (stored <= scales * (1 + 2**-7)).all()
    exact = torch.tensor([0.5, 1.0, 1.25, 3.0])
    assert torch.equal(stored_scales(exact), exact)
    assert stored_scales(torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("sym", [True, False])
def test_shrink_narrows_the_range(sym: bool) -> None:
    weight = torch.randn(4, 2, 64)
    full, half = minmax_grid(weight, 4, sym), minmax_grid(weight, 4, sym, 0.5)
    torch.testing.assert_close(half.scales, full.scales / 2, rtol=2**-6, atol=0)
    shrink = torch.tensor([[1.0, 0.5]] * 4)
    mixed = minmax_grid(weight, 4, sym, shrink)
    assert torch.equal(mixed.scales[:, 0], full.scales[:, 0]) and torch.equal(mixed.scales[:, 1], half.scales[:, 1])
    codes = half.encode(weight)
    assert codes.min() == 0 and codes.max() == 15


def test_the_weight_is_left_alone() -> None:
    weight = torch.randn(2, 2, 16)
    before = weight.clone()
    minmax_grid(weight, 4, False).encode(weight)
    assert torch.equal(weight, before)


def test_group_length() -> None:
    assert group_length(576, 64) == 64 and group_length(100, -1) == 100 and group_length(192, 48) == 48
    with pytest.raises(ValueError, match=r"^group_size: got 64; .* 96 input features of a\.b: 16, 32, 96, -1$"):
        group_length(96, 64, "a.b")
    with pytest.raises(ValueError, match=r"100 input features of the matrix: -1$"):
        group_length(100, 16)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((5, 64, False), "bits"),
        ((4.0, 64, False), "bits"),
        (("4", 64, False), "bits"),
        ((True, 64, False), "bits"),
        ((4, 15, False), "group_size"),
        ((4, 129, False), "group_size"),
        ((4, 0, False), "group_size"),
        ((4, -2, False), "group_size"),
        ((4, 64.0, False), "group_size"),
        ((4, True, False), "group_size"),
        ((4, 64, 1), "sym"),
        ((4, 64, None), "sym"),
    ],
)
def test_refused_formats(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        check_format(*arguments)


def test_accepted_formats() -> None:
    for bits in PACKED_BITS:
        for group_size in (16, 48, 64, 128, -1):
            check_format(bits, group_size, sym=bits % 2 == 0)
