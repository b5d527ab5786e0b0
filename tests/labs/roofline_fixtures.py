"""Ceilings that do not move, and a model that runs in milliseconds, so that a test knows every figure beforehand."""

import torch

from labkit.hardware import Ceilings
from labkit.models import LoadedModel, tiny_model

PEAKS = {torch.float32: 4e10, torch.bfloat16: 8e10}
CEILINGS = Ceilings(1e10, 8e9, PEAKS, "a machine", 2, {})


def loaded(**overrides: int) -> LoadedModel:
    """A tiny model under a name, without a tokenizer, which the lab does not use."""
    return LoadedModel(tiny_model(**overrides), None, "tiny")
