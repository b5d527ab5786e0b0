"""What each implementation in `flash_attention_lab` computes, moves and holds, by the formulas: MODELLED."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from labkit.attention.traffic import (
    flash_cost,
    flash_extra_bytes,
    least_cost,
    standard_costs,
    standard_extra_bytes,
)
from labkit.roofline import OpCost

if TYPE_CHECKING:
    from labkit.labs._flash_attention_result import FlashAttentionParams

# What is compared: the matrix in memory, PyTorch's kernel, and the course's own at the chosen block sizes.
ROLES = ("standard", "native", "own")


@functools.lru_cache(maxsize=256)
def costs(params: FlashAttentionParams, role: str) -> tuple[OpCost, ...]:
    """FLOPs and bytes moved of one call: MODELLED. PyTorch's kernel chooses its own tiles: for it, the pairs that are
    seen, and every byte once, which is the least for any."""
    shape = params.shape
    if role == "standard":
        return standard_costs(shape, params.dtype)
    if role == "own":
        return (flash_cost(shape, params.dtype, params.block_sizes),)
    return (least_cost(shape, params.dtype),)


def predicted_peak(params: FlashAttentionParams, role: str) -> int:
    """Bytes that one call takes beside q, k and v, its output included: MODELLED."""
    if role == "standard":
        return params.output_bytes + standard_extra_bytes(params.shape, params.dtype)
    return params.output_bytes + flash_extra_bytes(params.shape)


def moved_bytes(params: FlashAttentionParams, role: str) -> int:
    """Bytes that one call moves between memory and the chip where no cache helps."""
    return sum(cost.bytes for cost in costs(params, role))


def product_flops(params: FlashAttentionParams, role: str) -> int:
    """FLOPs of the two products of one call, over the pairs that this role computes."""
    return sum(cost.matmul_flops for cost in costs(params, role))
