"""What another library saved, dequantized into a copy of the float model: one perplexity for all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kernels.types import PackedWeight
from labkit.models import shared_copy
from labkit.quantization.layouts import from_awq, from_gptq

_QUANTIZED = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """matrices: by the full name of their module; floats: the other tensors by theirs. `nbytes` of what the matrices
    are stored in, scales, zero points and indices included."""

    matrices: Mapping[str, PackedWeight]
    floats: Mapping[str, Tensor]
    nbytes: int


def _settings(folder: Path) -> dict[str, object]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config", {})
    _check.choice("quant_method", config.get("quant_method", "gptq"), ("gptq", "awq"))
    # AutoGPTQ writes neither its name nor a format: it knew only the first.
    settings = {"quant_method": "gptq", "checkpoint_format": "gptq"} | config
    if settings["quant_method"] == "awq":
        _check.choice("version", settings.get("version", "gemm"), ("gemm",))
    else:
        _check.choice("checkpoint_format", settings["checkpoint_format"], ("gptq", "gptq_v2"))
    return settings


def _matrix(tensors: Mapping[str, Tensor], settings: Mapping[str, object]) -> PackedWeight:
    if settings["quant_method"] == "awq":
        return from_awq(tensors)
    v1 = settings["checkpoint_format"] == "gptq"
    return from_gptq(tensors, settings["bits"], sym=settings["sym"], v1=v1)


def read_checkpoint(folder: Path) -> Checkpoint:
    """A folder in the GPTQ (v1 or v2) or AWQ "gemm" layout, of one or several safetensors files.

    Errors: ValueError for another layout, and for a folder without a quantized matrix.
    """
    settings, groups, floats = _settings(folder), {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            module, _, kind = name.rpartition(".")
            if kind in _QUANTIZED:
                groups.setdefault(module, {})[kind] = tensor
            else:
                floats[name] = tensor
    _check.require(bool(groups), "checkpoint", f"{folder.name} without a quantized matrix", "one in GPTQ or AWQ layout")
    matrices = {name: _matrix(tensors, settings) for name, tensors in groups.items()}
    nbytes = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values())
    return Checkpoint(matrices, floats, nbytes)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """A parameter replaced, never written into: the copy shares it with the float model."""
    module, _, field = name.rpartition(".")
    owner = model.get_submodule(module)
    old = getattr(owner, field)
    _check.require(old.shape == value.shape, name, f"shape {tuple(value.shape)}", f"{tuple(old.shape)}")
    setattr(owner, field, nn.Parameter(value.to(old.device, old.dtype), requires_grad=False))


@torch.no_grad()
def dequantized(model: PreTrainedModel, checkpoint: Checkpoint) -> PreTrainedModel:
    """A copy of the float `model` with the values that a checkpoint stands for, in the model's dtype.

    Errors: ValueError for names or shapes that are not the model's, and for a weight that is not in the checkpoint: it
    would keep its float value, and the perplexity would be of something else.
    """
    copy = shared_copy(model)
    known = dict(model.named_parameters(remove_duplicate=False))
    weights = {f"{name}.weight": weight.dequantize(torch.float32) for name, weight in checkpoint.matrices.items()}
    values = _without_empty_biases(checkpoint.floats, known) | weights
    for name in values:
        _check.choice("checkpoint", name, list(known))
    tied = {"lm_head.weight"} if copy.config.tie_word_embeddings else set()
    absent = sorted(known.keys() - values.keys() - tied)
    _check.require(not absent, "checkpoint", f"one without {', '.join(absent[:3])}", "one with every weight")
    for name, value in values.items():
        _put(copy, name, value)
    if copy.config.tie_word_embeddings and "lm_head.weight" not in checkpoint.floats:
        copy.get_output_embeddings().weight = copy.get_input_embeddings().weight
    return copy


def _without_empty_biases(floats: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """AutoGPTQ writes a bias of zeros for a matrix that has none."""
    return {name: value for name, value in floats.items() if name in known or not name.endswith(".bias") or value.any()}
