"""The report: errors as the definition has them, and a table that says what was stored."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.models import tiny_model
from labkit.quantization import (
    GPTQConfig,
    MatrixReport,
    QuantizationReport,
    RTNConfig,
    output_error,
    quantize_,
)
from labkit.quantization.linear import QuantLinear


def test_output_error_is_that_of_the_outputs() -> None:
    weight, approximation, x = torch.randn(8, 32), torch.randn(8, 32), torch.randn(50, 32)
    wide = x.double()
    noise = (wide @ (approximation - weight).double().T).square().mean()
    expected = (noise / (wide @ weight.double().T).square().mean()).item()
    assert output_error(weight, approximation, x.T @ x / 50) == pytest.approx(expected, rel=1e-5)
    assert output_error(weight, weight, x.T @ x) == 0.0
    assert math.isnan(output_error(weight, approximation, torch.zeros(32, 32)))


class _Products(TorchDispatchMode):
    """Dtypes of all matrix products and of all sums' results while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        self.sums: set[torch.dtype] = set()

    def __torch_dispatch__(self, op: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = op(*args, **kwargs or {})
        name = str(op)
        if ".mm." in name:
            self.products.add(out.dtype)
        if ".sum." in name:
            self.sums.add(out.dtype)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_error_multiplies_in_float32_and_sums_in_float64(dtype: torch.dtype) -> None:
    weight, x = torch.randn(16, 64).to(dtype), torch.randn(200, 64)
    with _Products() as seen:
        output_error(weight, torch.randn(16, 64), x.T @ x / 200)
    assert seen.products == {torch.float32} and seen.sums == {torch.float64}
    # A difference along inputs that do not occur: the sum of rounding errors is no error below 0.
    flat = torch.outer(torch.ones(64), torch.ones(64)) * 1e4
    for seed in range(20):
        step = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed))
        step -= step.mean(1, keepdim=True)
        assert 0 <= output_error(weight[:1], weight[:1].float() + step, flat) < 1e-6


def test_output_error_of_bfloat16_weights() -> None:
    weight = torch.randn(4, 8).bfloat16()
    assert output_error(weight, weight.float() * 1.1, torch.eye(8)) == pytest.approx(0.01, rel=1e-3)


def test_bits_per_weight_counts_all_that_is_stored() -> None:
    matrix = MatrixReport("a", 4, 640, 1024, None)
    assert matrix.bits_per_weight == 5.0
    report = QuantizationReport(RTNConfig(), (matrix, MatrixReport("b", 8, 3072, 3072, 0.0123)), ("a note",), 1.5)
    assert report.bits_per_weight == pytest.approx(8 * 3712 / 4096)
    assert report.table().columns == ("matrix", "bits", "bits stored", "output error")
    assert report.table().rows == (("a", "4", "5.00", ""), ("b", "8", "8.00", "1.23%"))
    text = repr(report)
    assert "RTNConfig" in text and "2 matrices, 7.25 bits a weight, 1.5 s" in text and text.endswith("\na note")


def test_the_report_of_a_run() -> None:
    model, ids = tiny_model(), torch.randint(0, 256, (2, 16))
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    report = quantize_(model, RTNConfig(3, 32), ids, bits_per_module={names[2]: 8}, progress=False)
    assert [m.name for m in report.matrices] == names and report.config == RTNConfig(3, 32)
    assert report.seconds > 0 and report.notes == ()
    for matrix in report.matrices:
        module = model.get_submodule(matrix.name)
        assert isinstance(module, QuantLinear) and matrix.bits == module.weight.bits
        assert matrix.bits == (8 if matrix.name == names[2] else 3)
        assert matrix.nbytes == module.weight.nbytes
        assert matrix.elements == module.in_features * module.out_features
        assert 0 < matrix.error < 0.2


def test_a_bias_is_no_part_of_a_matrix() -> None:
    model = tiny_model(attention_bias=True)
    report = quantize_(model, RTNConfig(4, 32), progress=False)
    q_proj = model.model.layers[0].self_attn.q_proj
    assert q_proj.bias is not None and report.matrices[0].nbytes == q_proj.weight.nbytes
    assert all(matrix.error is None for matrix in report.matrices)


def test_gptq_reports_a_smaller_error_than_rounding() -> None:
    ids = torch.randint(0, 256, (8, 32))
    errors = [
        sum(m.error for m in quantize_(tiny_model(), config, ids, progress=False).matrices)
        for config in (GPTQConfig(3, 32), RTNConfig(3, 32))
    ]
    assert errors[0] < 0.8 * errors[1]
