"""A model that runs in milliseconds with a tokenizer that needs no file, and a compute of the lab over both."""

from types import SimpleNamespace

import torch

from labkit.labs._quantization_compute import QuantizationCompute
from labkit.labs._quantization_result import QuantizationParams, QuantizationResult
from labkit.models import LoadedModel, tiny_model

CPU = torch.device("cpu")
KINDS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tokenizer(text: str, **_: object) -> SimpleNamespace:
    """One id a byte."""
    return SimpleNamespace(input_ids=list(text.encode()))


def loaded(**overrides: object) -> LoadedModel:
    """Two layers of 64 hidden and 128 inner units."""
    return LoadedModel(tiny_model(**overrides), tokenizer, "tiny")


def run(
    compute: QuantizationCompute, bits: int = 4, group_size: int = 32, method: str = "RTN"
) -> list[QuantizationResult]:
    """Every result of one setting, in order."""
    params = QuantizationParams(bits, group_size, method, "tiny")
    return [step for step in compute(params, lambda: False) if isinstance(step, QuantizationResult)]
