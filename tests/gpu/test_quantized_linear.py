"""The compiled kernel for packed weights on a GPU; without one, `gpu-check --allow-cpu` runs it in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from labkit.kernels import PackedWeight, choose_backend, quantized_linear
from labkit.kernels.bits import pack_bits
from labkit.kernels.quantized_linear import InterleavedWeight, decode_layout, interleaved
from labkit.models import tiny_model
from labkit.quantization import QuantLinear, RTNConfig, quantize_

pytestmark = pytest.mark.gpu
room = pytest.importorskip("labkit.kernels.quantized_linear.triton")

SHAPES = [(256, 1024, 128), (576, 576, 64), (100, 96, 48), (33, 77, 77)]


def random_weight(shape: tuple, bits: int, device: torch.device, *, sym: bool, act_order: bool) -> PackedWeight:
    """Random codes, scales and zero points: any of them is a weight."""
    out_features, in_features, group = shape
    top, groups = 1 << bits, in_features // group
    g_idx = (torch.randperm(in_features) // group).int() if act_order else None
    return PackedWeight(
        pack_bits(torch.randint(0, top, (out_features, in_features)), bits),
        (torch.rand(out_features, groups) * 2 / top).to(torch.bfloat16),
        None if sym else torch.randint(0, top, (out_features, groups)).to(torch.uint8),
        g_idx,
        bits,
        group,
        in_features,
    ).map(lambda tensor: tensor.to(device))


def dtypes(device: torch.device) -> list[torch.dtype]:
    """Triton's interpreter multiplies float16 alone."""
    return [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 33, 65, 300])
@pytest.mark.parametrize("bits", interleaved.BITS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_errs_at_most_twice_as_much_as_pytorch(
    rows: int, bits: int, act_order: bool, shape: tuple, device: torch.device
) -> None:
    if device.type != "cuda" and (rows > 17 or shape[0] > 100):
        pytest.skip("the interpreter takes long; tests/kernels has what it can do")
    weight = random_weight(shape, bits, device, sym=bits == 8, act_order=act_order)
    laid_out = InterleavedWeight.of(weight)
    for dtype in dtypes(device):
        x = torch.randn(rows, shape[1], device=device, dtype=dtype)
        exact = x.double() @ weight.dequantize(torch.float64).T
        plain = (F.linear(x, weight.dequantize(dtype)).double() - exact).abs().max()
        got = quantized_linear(x, laid_out, backend="triton")
        assert got.isfinite().all() and (got.double() - exact).abs().max() <= 2 * plain
        assert not laid_out.tickets.any()
        torch.testing.assert_close(room.dequantize(laid_out, dtype), weight.dequantize().to(dtype))


def test_the_same_bits_every_time(device: torch.device) -> None:
    """Parts of a split product are added in a fixed order, whoever comes last; a hundred runs, to find a race."""
    weight = InterleavedWeight.of(random_weight((512, 2048, 128), 4, device, sym=False, act_order=False))
    x = torch.randn(4, 2048, device=device, dtype=torch.float16)
    first = quantized_linear(x, weight, backend="triton")
    for _ in range(100 if device.type == "cuda" else 1):
        assert torch.equal(quantized_linear(x, weight, backend="triton"), first)


def test_auto_takes_the_kernel_for_few_rows_and_the_library_for_many(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("on a CPU the interpreter runs only by name")
    weight = decode_layout(random_weight((256, 512, 128), 4, device, sym=False, act_order=True), torch.bfloat16)
    assert isinstance(weight, InterleavedWeight)
    exact = weight.dequantize(torch.float64)
    for rows, name in ((1, "triton"), (room.DEQUANTIZE_FROM_ROWS, "torch")):
        x = torch.randn(rows, 512, device=device, dtype=torch.bfloat16)
        assert choose_backend("quantized_linear", x, weight).name == name
        got = quantized_linear(x, weight)
        torch.testing.assert_close(got.double(), x.double() @ exact.T, rtol=2e-2, atol=0.3)


def test_a_cuda_graph_replays_it(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    weight = InterleavedWeight.of(random_weight((256, 1024, 128), 4, device, sym=True, act_order=False))
    x = torch.randn(2, 1024, device=device, dtype=torch.bfloat16)
    quantized_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_linear(x, weight)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(y, quantized_linear(x, weight))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_model_decodes_with_it(bits: int, device: torch.device) -> None:
    model = tiny_model().to(device, torch.bfloat16)
    quantize_(model, RTNConfig(bits=bits, group_size=32), progress=False)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    if device.type == "cuda":
        assert all(isinstance(layer.weight, InterleavedWeight) for layer in layers)
    ids = torch.randint(0, 256, (2, 8), device=device)
    got = model(input_ids=ids).logits.float()
    model.to(torch.float32)
    assert all(isinstance(layer.weight, PackedWeight) for layer in layers)
    expected = model(input_ids=ids).logits
    assert (got - expected).norm() < 0.03 * expected.norm()
