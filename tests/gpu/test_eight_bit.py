"""INT8 and FP8 matrices on a GPU: its matmul of the codes, beside the same codes multiplied in float64."""

import pytest
import torch

from labkit.models import tiny_model
from labkit.quality import kl_divergence
from labkit.quantization import FP8Config, SmoothQuantConfig, fp8, quantize_, smoothquant
from labkit.quantization.row_scaled import row_scales

pytestmark = pytest.mark.gpu

_ROOMS = {"int8": smoothquant, "fp8": fp8}


def _skip_without(kind: str, device: torch.device) -> None:
    reason = fp8.why_no_fp8(device) if kind == "fp8" else ""
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 300])
@pytest.mark.parametrize("kind", _ROOMS)
def test_it_multiplies_the_codes_with_both_scales(
    kind: str, rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The sums of INT8 are exact; what is left is the rounding of the output, in FP8 on a GPU to bfloat16 first."""
    _skip_without(kind, device)
    module = _ROOMS[kind].quantize_rows(torch.randn(384, 256), torch.randn(384)).to(device)
    x = (torch.randn(rows, 256) * torch.logspace(-2, 2, rows)[:, None]).to(device, dtype)
    scales = row_scales(x, 127 if kind == "int8" else 448.0)
    quotient = x.float() / scales
    codes = quotient.round() if kind == "int8" else quotient.to(torch.float8_e4m3fn)
    products = codes.double() @ module.qweight.double().T
    expected = products * scales.double() * module.scales.double() + module.bias.double()
    got = module(x)
    assert got.dtype == dtype and got.shape == (rows, 384) and got.device == x.device
    tolerance = 1e-5 if kind == "int8" and dtype == torch.float32 else 2**-7
    error = (got.double() - expected).abs()
    assert bool((error <= tolerance * expected.abs().amax(1, keepdim=True)).all())


@pytest.mark.parametrize("config", [SmoothQuantConfig(), FP8Config()], ids=["int8", "fp8"])
def test_a_model_is_quantized_where_it_is(config: object, device: torch.device) -> None:
    _skip_without("fp8" if isinstance(config, FP8Config) else "int8", device)
    model = tiny_model().to(device)
    ids = torch.randint(0, 256, (2, 32), device=device)
    before = model(input_ids=ids).logits
    quantize_(model, config, ids, progress=False)
    after = model(input_ids=ids).logits
    assert after.device.type == device.type
    assert 1e-5 < kl_divergence(before, after) < 0.3
