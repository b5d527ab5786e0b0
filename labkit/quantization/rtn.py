"""Round to nearest: each weight to the nearest point of its group's grid, without looking at any input."""

from dataclasses import dataclass

import torch

from labkit.kernels.types import PackedWeight
from labkit.quantization.calibration import LayerResult, LayerTask
from labkit.quantization.linear import packed_replacement
from labkit.quantization.packing import pack_weight
from labkit.quantization.primitives import check_format, group_length, minmax_grid


@dataclass(frozen=True)
class RTNConfig:
    """Integers of `bits` (2, 3, 4 or 8) with one scale for each `group_size` weights of a row (-1: the whole row);
    `sym`: the zero point is the middle code, and is not stored."""

    bits: int = 4
    group_size: int = 64
    sym: bool = False

    def __post_init__(self) -> None:
        check_format(self.bits, self.group_size, self.sym)


def round_to_nearest(weight: torch.Tensor, config: RTNConfig) -> PackedWeight:
    """`weight (out_features, in_features)`, packed. Errors: ValueError where the groups do not divide the columns."""
    group = group_length(weight.shape[1], config.group_size)
    grouped = weight.float().unflatten(1, (-1, group))
    grid = minmax_grid(grouped, config.bits, config.sym)
    return pack_weight(grid.encode(grouped).flatten(1), grid, sym=config.sym)


def quantize_layer(task: LayerTask) -> LayerResult:
    """Every matrix of the task."""
    packed = {name: round_to_nearest(linear.weight, task.config_of(name)) for name, linear in task.linears.items()}
    return LayerResult({name: packed_replacement(task.linears[name], weight) for name, weight in packed.items()})
