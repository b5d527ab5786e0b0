"""The roof that an op stands under: what a device can reach, and which of its two limits comes first.

Attainable FLOP/s = min(peak, intensity * bandwidth): Williams, Waterman and Patterson, "Roofline: an insightful visual
performance model for multicore architectures", CACM 52(4), 2009. Costs come from `labkit.step_costs` and sizes from
`labkit.sizing`; both are to be had here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.sizing import MemoryBreakdown, kv_bytes_per_token, memory_bytes, parameter_count, weight_bytes
from labkit.step_costs import LINEAR_OPS, OpCost, op_costs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from labkit.hardware import Ceilings

__all__ = [
    "LINEAR_OPS",
    "MemoryBreakdown",
    "OpCost",
    "attainable_flops",
    "batch_at_ridge",
    "kv_bytes_per_token",
    "memory_bytes",
    "op_costs",
    "parameter_count",
    "ridge",
    "time_floor",
    "weight_bytes",
]


def _peak(ceilings: Ceilings, dtype: torch.dtype | str) -> float:
    """The measured matmul FLOP/s of `dtype`."""
    known = hasattr(ceilings, "matmul_flops") and hasattr(ceilings, "read_bandwidth")
    _check.require(known, "ceilings", type(ceilings).__name__, "the Ceilings that measure_ceilings returns")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    names = " or ".join(str(d).removeprefix("torch.") for d in ceilings.matmul_flops)
    measured = isinstance(found, torch.dtype) and found in ceilings.matmul_flops
    _check.require(measured, "dtype", str(dtype), f"a dtype whose peak was measured: {names}")
    return ceilings.matmul_flops[found]


def ridge(ceilings: Ceilings, dtype: torch.dtype | str) -> float:
    """FLOPs a byte at which the two roofs meet: below it an op is memory-bound, above it compute-bound."""
    return _peak(ceilings, dtype) / ceilings.read_bandwidth


def attainable_flops(intensity: float, ceilings: Ceilings, dtype: torch.dtype | str) -> float:
    """FLOP/s that an op of `intensity` FLOPs a byte can reach at most."""
    intensity = _check.number("intensity", intensity, 0.0)
    return min(_peak(ceilings, dtype), intensity * ceilings.read_bandwidth)


def time_floor(cost: OpCost | Iterable[OpCost], ceilings: Ceilings, dtype: torch.dtype | str) -> float:
    """Seconds that an op needs at least: its bytes at the read bandwidth or its FLOPs at the peak, whichever is longer.

    For several ops, the sum: they run one after another. Writes are priced as reads, so that it stays a floor; where a
    cache still holds an activation that the op before it wrote, an elementwise op may come in under it.
    """
    costs = [cost] if isinstance(cost, OpCost) else list(cost) if isinstance(cost, Iterable) else [cost]
    _check.require(
        all(isinstance(c, OpCost) for c in costs), "cost", costs, "an OpCost or several, as op_costs returns"
    )
    peak = _peak(ceilings, dtype)
    return sum(max(c.bytes / ceilings.read_bandwidth, c.flops / peak) for c in costs)


def batch_at_ridge(
    config: PretrainedConfig,
    ceilings: Ceilings,
    dtype: torch.dtype | str,
    *,
    weight_dtype: torch.dtype | str | None = None,
) -> int | None:
    """The smallest batch at which a decode step's linear layers, head included, stop being memory-bound.

    Their weights are read once however many sequences there are, so that intensity grows with the batch; attention is
    left out, since each sequence brings its own cache and its intensity stays. With F FLOPs and A activation bytes a
    sequence, W weight bytes and the ridge r, F B >= r (W + A B). None where no batch is large enough: activations alone
    keep a narrow model below a high ridge.
    """
    costs = op_costs(config, batch=1, q_len=1, kv_len=1, dtype=dtype, weight_dtype=weight_dtype)
    linear = [c for c in costs if c.name in LINEAR_OPS]
    at = ridge(ceilings, dtype)
    gain = sum(c.flops for c in linear) - at * sum(c.activation_bytes for c in linear)
    return max(1, math.ceil(at * sum(c.weight_bytes for c in linear) / gain)) if gain > 0 else None
