"""Ceilings that do not move, above what any CPU reaches; a model that runs in milliseconds."""

import torch

from labkit.hardware import Ceilings
from labkit.models import LoadedModel, tiny_model

PEAKS = {torch.float32: 4e13, torch.bfloat16: 8e13}
CEILINGS = Ceilings(1e13, 8e12, PEAKS, "a machine", 2, {})


def loaded(**overrides: int) -> LoadedModel:
    """A tiny model under a name, without a tokenizer, which the lab does not use."""
    return LoadedModel(tiny_model(**overrides), None, "tiny")
