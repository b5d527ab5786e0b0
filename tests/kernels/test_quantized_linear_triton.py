"""quantized_linear's Triton kernel in Triton's interpreter, against float64; its layout there and back."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from labkit.kernels import BackendUnavailable, PackedWeight, choose_backend, quantized_linear
from labkit.kernels.quantized_linear import InterleavedWeight, decode_layout, interleaved
from labkit.kernels.quantized_linear import triton as room
from tests.kernels.packed import packed, same

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel")

# (out_features, in_features, group): whole blocks; a last block in part; odd numbers, one group; groups across blocks;
# the smallest groups; fewer columns than a field has.
SHAPES = [(64, 256, 128), (48, 576, 64), (33, 77, 77), (100, 96, 48), (7, 288, 96), (40, 256, 16), (5, 8, 8)]


def of(shape: tuple[int, int, int], bits: int, **options: bool) -> PackedWeight:
    out_features, in_features, group = shape
    return packed(torch.randn(out_features, in_features), bits, group, **options)


@pytest.mark.parametrize("bits", interleaved.BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layout_goes_there_and_back_bit_by_bit(bits: int, sym: bool, act_order: bool, shape: tuple) -> None:
    portable = of(shape, bits, sym=sym, act_order=act_order)
    laid_out = InterleavedWeight.of(portable)
    assert same(laid_out.unpack(), portable) and torch.equal(laid_out.dequantize(), portable.dequantize())
    assert laid_out.nbytes == sum(tensor.nbytes for tensor in laid_out.tensors.values())
    # Codes take their bits and no more, but for the filling of a last block.
    blocks = -(-shape[1] * bits // 512)
    assert laid_out.words.nbytes == blocks * shape[0] * 64
    assert same(decode_layout(laid_out, torch.float32), portable)


def test_where_each_code_lies() -> None:
    """Word j of a block holds in field i the column 16 i + j, read here without the code under test."""
    codes = torch.randint(0, 16, (3, 256))
    portable = dataclasses.replace(of((3, 256, 64), 4), qweight=_packed_by_hand(codes))
    words = InterleavedWeight.of(portable).words
    for block in range(2):
        for n in range(3):
            for j in range(16):
                fields = [(int(words[block, n, j]) >> (4 * i)) & 15 for i in range(8)]
                assert fields == [int(codes[n, 128 * block + 16 * i + j]) for i in range(8)]


def _packed_by_hand(codes: torch.Tensor) -> torch.Tensor:
    rows = [
        [sum(int(code) << (4 * i) for i, code in enumerate(row[at : at + 8])) for at in range(0, 256, 8)]
        for row in codes
    ]
    return torch.tensor(rows).to(torch.int32)


@pytest.mark.parametrize("bits", interleaved.BITS)
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_errs_at_most_twice_as_much_as_pytorch(bits: int, sym: bool, act_order: bool, shape: tuple) -> None:
    weight = of(shape, bits, sym=sym, act_order=act_order)
    laid_out = InterleavedWeight.of(weight)
    for rows in ((1,), (17,), (2, 20), ()):
        x = torch.randn(*rows, shape[1]).half()
        exact = x.double() @ weight.dequantize(torch.float64).T
        got = quantized_linear(x, laid_out, backend="triton")
        assert got.shape == exact.shape and got.dtype == torch.float16
        plain = F.linear(x, weight.dequantize(torch.float16))
        assert (got.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max() + 1e-7
        assert not laid_out.tickets.any()


@pytest.mark.parametrize("tile", room.TILES, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_every_tile_gives_the_same_sums(tile: room.Tile, act_order: bool) -> None:
    """In float32 sums of small integers are exact, so that the order of adding them shows nowhere."""
    weight = of((130, 1024, 64), 4, act_order=act_order)
    weight = dataclasses.replace(weight, scales=torch.ones_like(weight.scales))
    x = torch.randint(-2, 3, (min(tile.rows, 2 * tile.block_m + 3), 1024)).half()
    expected = (x.double() @ weight.dequantize(torch.float64).T).half()
    got = room.multiply(x, InterleavedWeight.of(weight), tile)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("columns", [128, 384, 1024])
def test_k_is_split_and_the_last_program_adds_the_parts(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = InterleavedWeight.of(of((64, columns, 64), 4))
    tile = room.TILES[0]
    assert room.split_for(tile, weight) == columns // 128 > 0
    assert room.split_for(room.TILES[-1], weight) == 1
    x = torch.randn(3, columns).half()
    split = room.multiply(x, weight)
    monkeypatch.setattr(room, "split_for", lambda tile, weight: 1)
    torch.testing.assert_close(split, room.multiply(x, weight), rtol=2e-3, atol=2e-3)
    # Twice, since the tickets have to be zeros again.
    assert torch.equal(split, _again(weight, x, monkeypatch))


def _again(weight: InterleavedWeight, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    monkeypatch.undo()
    room.multiply(x, weight)
    return room.multiply(x, weight)


def test_a_product_that_was_interrupted_spoils_none_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = InterleavedWeight.of(of((64, 512, 64), 4)), torch.randn(2, 512).half()
    expected = room.multiply(x, weight)
    weight.tickets[0] = 1  # as a KeyboardInterrupt between two programs leaves it
    assert torch.equal(room.multiply(x, weight), expected)


def test_what_the_wrapper_refuses() -> None:
    weight = InterleavedWeight.of(of((64, 512, 64), 4))
    with pytest.raises(AssertionError, match="17 rows; the tickets are for 16"):
        room.multiply(torch.randn(17, 512).half(), weight, room.TILES[0])
    with pytest.raises(AssertionError):
        room.multiply(torch.randn(17, 512), weight)


def test_a_gradient_is_never_lost() -> None:
    weight, x = InterleavedWeight.of(of((16, 64, 32), 4)), torch.randn(2, 64).half().requires_grad_()
    with pytest.raises(BackendUnavailable, match="no backward pass"):
        quantized_linear(x, weight, backend="triton")
    assert "no backward pass" in choose_backend("quantized_linear", x, weight).reason
    quantized_linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize().sum(0).half().expand(2, -1), rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        assert quantized_linear(x, weight, backend="triton").shape == (2, 16)


def test_every_code_and_zero_point_is_exact() -> None:
    """One column at a time through an identity matrix: scale 1, so that what comes out is code - zero."""
    for bits in interleaved.BITS:
        weight = of((16, 128, 16), bits)
        zeros = torch.arange(16 * 8).reshape(16, 8).remainder(1 << bits).to(torch.uint8)
        weight = dataclasses.replace(weight, scales=torch.ones_like(weight.scales), zeros=zeros)
        got = quantized_linear(torch.eye(128).half(), weight, backend="triton")
        assert torch.equal(got.T, weight.codes().half() - zeros.half().repeat_interleave(16, dim=1))


@pytest.mark.parametrize("bits", interleaved.BITS)
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_dequantizing_kernel(bits: int, act_order: bool, shape: tuple) -> None:
    weight = of(shape, bits, act_order=act_order)
    assert torch.equal(room.dequantize(InterleavedWeight.of(weight), torch.float32), weight.dequantize())


def test_strided_and_empty_inputs() -> None:
    weight = InterleavedWeight.of(of((16, 64, 32), 4, act_order=True))
    wide = torch.randn(5, 128).half()
    for x in (wide[:, ::2], wide[:, 64:], torch.randn(64, 5).half().T, torch.randn(4, 3, 64).half()[::2]):
        expected = quantized_linear(x.contiguous(), weight, backend="triton")
        assert torch.equal(quantized_linear(x, weight, backend="triton"), expected)
    # Rows apart, columns together: no copy is made of it.
    torch.testing.assert_close(room.multiply(wide[:, 64:], weight), quantized_linear(wide[:, 64:], weight))
    for shape in ((0, 64), (2, 0, 64)):
        assert quantized_linear(torch.zeros(shape).half(), weight, backend="triton").shape == (*shape[:-1], 16)


def test_nothing_past_the_last_group_is_read() -> None:
    """The filling of a last block belongs to no group; here NaN scales stand where it would."""
    weight = InterleavedWeight.of(of((16, 144, 48), 4))
    guarded = torch.full((5, 16), 0x7FC00000, dtype=torch.int32)
    guarded[:3] = weight.pairs
    weight = dataclasses.replace(weight, pairs=guarded[:3])
    assert quantized_linear(torch.randn(2, 144).half(), weight, backend="triton").isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_nan_and_infinity_stay_in_their_row() -> None:
    weight, x = InterleavedWeight.of(of((16, 96, 32), 4)), torch.randn(3, 96).half()
    x[1, 5], x[1, 95] = float("nan"), float("inf")
    got = quantized_linear(x, weight, backend="triton")
    assert got[1].isnan().all() and got[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: of((16, 64, 32), 3), "it reads 4 and 8 bits; the weight has 3"),
        (lambda: of((16, 80, 40), 4), "a multiple of 16 columns; the weight has groups of 40"),
        (lambda: _with_scales(of((16, 64, 32), 4), torch.float16), "bfloat16 scales; the weight's are float16"),
    ],
)
def test_what_the_kernel_cannot_read(make: object, why: str) -> None:
    weight, x = make(), torch.randn(1, make().in_features).half()
    with pytest.raises(BackendUnavailable, match=why):
        quantized_linear(x, weight, backend="triton")
    expected = x.double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(quantized_linear(x, weight).double(), expected, rtol=1e-2, atol=1e-2)


def _with_scales(weight: PackedWeight, dtype: torch.dtype) -> PackedWeight:
    return dataclasses.replace(weight, scales=weight.scales.to(dtype))


def test_without_a_gpu_the_interpreter_runs_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = InterleavedWeight.of(of((16, 64, 32), 4)), torch.randn(2, 64).half()
    choice = choose_backend("quantized_linear", x, weight)
    assert choice.name == "torch" and "its interpreter runs for backend='triton' alone" in choice.reason
    monkeypatch.setattr(room, "multiply", lambda *_: pytest.fail("the kernel ran"))
    assert quantized_linear(x, weight).shape == (2, 16)
    with pytest.raises(BackendUnavailable, match="float16 rightly, and x is bfloat16"):
        quantized_linear(x.bfloat16(), weight, backend="triton")


def test_the_interpreter_is_switched_on_before_triton_is_imported() -> None:
    """In processes of their own: this one has imported it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

    def run(code: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", "from labkit.kernels import interpret_without_gpu as switch\n" + code]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])

    product = (
        "from labkit.kernels.quantized_linear import triton\nprint(type(triton._quantized_linear_kernel).__name__)"
    )
    assert run(f"print(switch(), switch())\n{product}").stdout.split() == ["True", "True", "InterpretedFunction"]
    assert run(product).stdout.split() == ["JITFunction"]
    late = run("import triton\nswitch()")
    assert "restart, and call interpret_without_gpu() first" in late.stderr
