"""The models that `quantization_lab` measures: float, packed, and in bfloat16 for decoding. No widgets here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit.labs._quantization_result import QuantizationParams, Sizes
from labkit.labs._result import si
from labkit.models import LoadedModel, load_model, shared_copy
from labkit.quantization import PackedWeight, QuantLinear, RTNConfig, quantize_, weight_bytes
from labkit.quantization.plan import Plan, plan

_HEADROOM = 0.9  # of the memory that is free
_MOST_BITS = 32  # of one scale, zero point and index a group, at most
LEFT_ALONE = ("lm_head",)


@functools.lru_cache(maxsize=2)
def load_once(name: str, device: torch.device) -> LoadedModel:
    """One copy of a model a process and device, whichever labs ask for it."""
    return load_model(name, device=device)


@dataclass(frozen=True)
class Packed:
    """A model rounded to nearest and its packed weights by full name (`rounded`); the same in the order in which the
    method lays out its columns (`weights`), and the bytes of those."""

    model: PreTrainedModel
    rounded: Mapping[str, PackedWeight]
    weights: Mapping[str, PackedWeight]
    sizes: Sizes


class Models:
    """The float model as it was loaded, and what is made of it. Copies share all tensors that do not change."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.plan: Plan = plan(loaded.model, LEFT_ALONE)
        self.kinds = [name.rpartition(".")[2] for name in self.plan.layers[0][2]]
        self._fast: PreTrainedModel | None = None

    @property
    def fast(self) -> PreTrainedModel:
        """The float model in bfloat16, which is what decodes; made once."""
        if self._fast is None:
            model = self.loaded.model
            same = model.dtype is torch.bfloat16
            self._fast = model if same else shared_copy(model).to(torch.bfloat16)
        return self._fast

    def refuse_if_too_large(self, params: QuantizationParams, free_bytes: int) -> None:
        """ValueError with the bytes and a number of bits that would fit. The float model is loaded already."""
        weights = sum(linear.weight.numel() for linear in self.plan.linears.values())
        whole = sum(p.numel() for p in self.loaded.model.parameters())
        once = 0 if self._fast is not None or self.loaded.model.dtype is torch.bfloat16 else 2 * whole
        group = params.group_size if params.group_size > 0 else self.loaded.model.config.hidden_size

        def needed(bits: int) -> int:
            # Packed once for the float model and once as the bfloat16 one decodes it.
            return once + int(2 * weights * (bits + _MOST_BITS / group) / 8)

        if needed(params.bits) <= _HEADROOM * free_bytes:
            return
        fitting = [bits for bits in (2, 3, 4, 8) if needed(bits) <= _HEADROOM * free_bytes]
        takes = f"at most {fitting[-1]} bits" if fitting else "a smaller model"
        beside = si(needed(params.bits), "B")
        raise ValueError(
            f"bits: got {params.bits} for a model of {si(whole, 'parameters')}, which needs {beside} beside the model "
            f"where {si(free_bytes, 'B')} are free; takes {takes}"
        )

    def pack(self, params: QuantizationParams) -> Packed:
        """A copy rounded to nearest, its codes laid out as the method lays them out."""
        model = shared_copy(self.loaded.model)
        config = RTNConfig(bits=params.bits, group_size=params.group_size)
        quantize_(model, config, modules_to_not_convert=LEFT_ALONE, progress=False)
        rounded = {name: model.get_submodule(name).portable() for name in self.plan.linears}
        lay_out = _act_order if params.method == "GPTQ" else lambda weight: weight
        weights = {name: lay_out(weight) for name, weight in rounded.items()}
        return Packed(model, rounded, weights, self._sizes(weights))

    def _sizes(self, weights: Mapping[str, PackedWeight]) -> Sizes:
        elements = sum(linear.weight.numel() for linear in self.plan.linears.values())
        whole = weight_bytes(self.fast)
        codes = sum(weight.qweight.nbytes for weight in weights.values())
        packed = sum(weight.nbytes for weight in weights.values())
        return Sizes(elements, codes, packed, whole - torch.bfloat16.itemsize * elements, whole)

    def decoding(self, packed: Packed) -> PreTrainedModel:
        """The bfloat16 model with these packed weights in it, laid out for decoding."""
        model = shared_copy(self.fast)
        for name, weight in packed.weights.items():
            parent, _, child = name.rpartition(".")
            bias = model.get_submodule(name).bias
            setattr(model.get_submodule(parent), child, QuantLinear(weight, bias, dtype=torch.bfloat16))
        return model


def _act_order(weight: PackedWeight) -> PackedWeight:
    """With columns that belong to their groups in another order, as GPTQ's act-order leaves them.

    The same bytes and the same work in a decode step; which column is where changes neither.
    """
    columns, group = weight.in_features, weight.group_size
    if group == columns:
        return weight
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
    return replace(weight, g_idx=(order // group).to(torch.int32).to(weight.device))


def fitting_group_sizes(in_features: set[int]) -> tuple[int, ...]:
    """The group sizes that divide every matrix; -1, the row, always does."""
    _check.require(bool(in_features), "model", "no matrices", "a causal LM with linear layers")
    return (*(size for size in (16, 32, 64, 96, 128) if all(n % size == 0 for n in in_features)), -1)
