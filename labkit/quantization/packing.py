"""From codes and a grid to a `PackedWeight`, and the bytes that a model's weights take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from labkit import _check
from labkit.kernels.bits import pack_bits, unpack_bits, words_per_row
from labkit.kernels.quantized_linear import Int4PackWeight
from labkit.kernels.types import PackedWeight
from labkit.models import LoadedModel, plain_model
from labkit.quantization.primitives import SCALE_DTYPE, Grid

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PackedWeight", "pack_bits", "pack_weight", "read_bytes", "unpack_bits", "weight_bytes", "words_per_row"]


def pack_weight(codes: torch.Tensor, grid: Grid, *, sym: bool, g_idx: torch.Tensor | None = None) -> PackedWeight:
    """`codes (out_features, in_features)`, whole numbers, columns in the model's order, with their grid.

    `g_idx (in_features,)` is each column's group where groups are not consecutive columns.
    """
    out_features, in_features = codes.shape
    return PackedWeight(
        qweight=pack_bits(codes.to(torch.uint8), grid.bits),
        scales=grid.scales.to(SCALE_DTYPE).contiguous(),
        zeros=None if sym else grid.zeros.to(torch.uint8).contiguous(),
        g_idx=None if g_idx is None else g_idx.to(torch.int32).contiguous(),
        bits=grid.bits,
        group_size=in_features // grid.scales.shape[1],
        in_features=in_features,
    )


def _weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and the buffers of quantized modules; a tensor that two modules share comes once."""
    seen: set[int] = set()
    for module in model.modules():
        own = [*module.parameters(recurse=False)]
        if getattr(module, "is_quantized", False):
            own += module.buffers(recurse=False)
        for tensor in own:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def weight_bytes(model: nn.Module | LoadedModel) -> int:
    """Bytes of all weights of a model as they lie in memory: parameters, packed codes, scales, zero points, indices.

    A tied embedding counts once; what is no weight (rotary tables) is left out.
    """
    model = plain_model(model)
    _check.require(isinstance(model, nn.Module), "model", type(model).__name__, "a LoadedModel or a torch module")
    return sum(tensor.nbytes for tensor in _weights(model))


def read_bytes(model: PreTrainedModel | LoadedModel) -> int:
    """Bytes of weights that one decode step of one sequence reads: all but an embedding that is no head, of which it
    reads a row, and zero points that lie beside offsets already computed from them."""
    model = plain_model(model)
    total = weight_bytes(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if table.weight is not head.weight:
        total -= table.weight.nbytes
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Int4PackWeight) and weight.zeros is not None:
            total -= weight.zeros.nbytes
    return total
