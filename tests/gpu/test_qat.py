"""Quantization-aware training on a GPU: interrupted and resumed there, it ends with the weights of a whole run."""

import dataclasses
from pathlib import Path

import pytest
import torch

from labkit.models import tiny_model
from labkit.quantization import QATConfig, QuantLinear, quantize_
from labkit.training import batch_indices

pytestmark = pytest.mark.gpu

_CONFIG = QATConfig(group_size=32, start="rtn", trainable="codes and scales", steps=6, learning_rate=0.05)


def _model(device: torch.device) -> torch.nn.Module:
    """Far enough from zero that 3 bits hurt."""
    torch.manual_seed(0)
    model = tiny_model(hidden_size=64, intermediate_size=128).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(3)
    return model.to(device)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_training_resumes_where_it_was_saved(
    compute_dtype: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(0, 256, (8, 24), generator=torch.Generator().manual_seed(1)).to(device)
    config = dataclasses.replace(_CONFIG, compute_dtype=compute_dtype)
    whole, halves = _model(device), _model(device)
    expected = quantize_(whole, config, ids, progress=False)
    config = dataclasses.replace(config, state_path=tmp_path / "qat.safetensors", time_limit_s=1e-9)
    assert quantize_(_model(device), config, ids, progress=False).stopped
    steps = []
    monkeypatch.setattr(
        "labkit.training.batch_indices",
        lambda step, *rest: (steps.append(step), batch_indices(step, *rest))[1],
    )
    report = quantize_(halves, dataclasses.replace(config, time_limit_s=None), ids, progress=False)
    assert steps == [1, 2, 3, 4, 5]
    assert report.losses == pytest.approx(expected.losses, rel=1e-3)
    moved = 0
    for name, module in halves.named_modules():
        if isinstance(module, QuantLinear):
            first, second = module.portable(), whole.get_submodule(name).portable()
            assert first.device.type == device.type
            # A GPU adds gradients in an order of its own; what lies next to the middle of two codes may fall apart.
            assert (first.codes() != second.codes()).float().mean() < 0.01
            torch.testing.assert_close(first.scales, second.scales, rtol=2**-6, atol=0.0)
            moved += 1
    assert moved == 14
