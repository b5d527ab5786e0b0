"""A model that runs in milliseconds, a tokenizer that needs no file, and a compute of the lab over both."""

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from labkit.labs._eviction_compute import EvictionCompute
from labkit.labs._eviction_result import EvictionParams, EvictionResult
from labkit.models import LoadedModel, tiny_model

CPU = torch.device("cpu")
# Bytes are many tokens: a sentence has to fit beside the fact.
NEEDLE_LENGTH = 400


class Bytes:
    """One id a byte."""

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode("ascii", "replace")))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("latin-1")


def loaded(**overrides: object) -> LoadedModel:
    """Two layers with two KV heads of 16; windows of 128 tokens would leave no room for a prompt."""
    return LoadedModel(tiny_model(max_position_embeddings=512, **overrides), Bytes(), "tiny")


def run(compute: EvictionCompute, method: str, budget: float, depth: float = 0.1) -> list[EvictionResult]:
    """Every result of one setting, in order."""
    params = EvictionParams(method, budget, depth, "tiny")
    return [step for step in compute(params, lambda: False) if isinstance(step, EvictionResult)]


def compute_for(model: LoadedModel) -> EvictionCompute:
    """Five needles, one a depth."""
    return EvictionCompute(model, CPU, n_needles=5, needle_length=NEEDLE_LENGTH)
