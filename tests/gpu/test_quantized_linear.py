"""The compiled kernel for packed weights on a GPU; without one, `gpu-check --allow-cpu` runs it in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from labkit.kernels import PackedWeight, choose_backend, quantized_linear
from labkit.kernels.bits import pack_bits
from labkit.kernels.quantized_linear import InterleavedWeight, decode_layout
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


# Each tile and width is compiled for each shape: few of each, since a section has 45 s.
@pytest.mark.parametrize("rows", [3, 17, 33, 300])
@pytest.mark.parametrize(("bits", "act_order"), [(4, False), (4, True), (8, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_errs_at_most_twice_as_much_as_pytorch(
    rows: int, bits: int, act_order: bool, shape: tuple, device: torch.device
) -> None:
    if device.type != "cuda" and (rows > 17 or shape[0] > 100):
        pytest.skip("the interpreter takes long; tests/kernels has what it can do")
    weight = random_weight(shape, bits, device, sym=bits == 8, act_order=act_order)
    laid_out = InterleavedWeight.of(weight)
    for dtype in dtypes(device) if shape is SHAPES[0] else dtypes(device)[-1:]:
        x = torch.randn(rows, shape[1], device=device, dtype=dtype)
        exact = x.double() @ weight.dequantize(torch.float64).T
        plain = (F.linear(x, weight.dequantize(dtype)).double() - exact).abs().max()
        got = quantized_linear(x, laid_out, backend="triton")
        assert got.isfinite().all() and (got.double() - exact).abs().max() <= 2 * plain
        assert not laid_out.tickets.any()
        torch.testing.assert_close(room.dequantize(laid_out, dtype), weight.dequantize().to(dtype))


def test_the_same_bits_every_time(device: torch.device) -> None:
    """Parts of a split product are added in a fixed order, whoever comes last. To find a race the inputs change from
    call to call: parts left over from the call before would be those of another product."""
    shape = (14336, 4096, 128) if device.type == "cuda" else (128, 512, 128)
    weight = InterleavedWeight.of(random_weight(shape, 4, device, sym=False, act_order=False))
    inputs = [torch.randn(4, shape[1], device=device, dtype=torch.float16) for _ in range(8)]
    exact = weight.dequantize().T
    first = [quantized_linear(x, weight, backend="triton") for x in inputs]
    for x, y in zip(inputs, first, strict=True):
        torch.testing.assert_close(y.float(), x.float() @ exact, rtol=1e-2, atol=1.0)
    for i in torch.randint(0, 8, (300 if device.type == "cuda" else 2,)).tolist():
        assert torch.equal(quantized_linear(inputs[i], weight, backend="triton"), first[i])


def test_the_device_of_the_tensors_is_where_it_runs() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    weight = InterleavedWeight.of(random_weight((64, 256, 128), 4, other, sym=False, act_order=False))
    x = torch.randn(2, 256, device=other, dtype=torch.float16)
    got = quantized_linear(x, weight, backend="triton").float()
    torch.testing.assert_close(got, x.float() @ weight.dequantize().T, rtol=1e-2, atol=0.1)


def test_float32_is_multiplied_in_float32(device: torch.device) -> None:
    weight = InterleavedWeight.of(random_weight((64, 256, 128), 4, device, sym=False, act_order=True))
    for rows in (1, 300):
        x = torch.randn(rows, 256, device=device)
        assert choose_backend("quantized_linear", x, weight).name == "torch"
        exact = x.double() @ weight.dequantize(torch.float64).T
        assert (quantized_linear(x, weight).double() - exact).norm() < 2e-3 * exact.norm()


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
