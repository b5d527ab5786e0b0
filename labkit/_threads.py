"""How many CPU threads a decode step runs fastest with: measured, since it depends on the neighbours too."""

import functools
import os
from typing import NamedTuple

import psutil
import torch
import torch.nn.functional as F

from labkit import _check
from labkit.kernels import dense_linear
from labkit.measure import compare_ops


def set_threads(candidates: list[int] | None = None) -> int:
    """Choose and set the CPU thread count under which a decode step runs fastest; returns it. Half a second.

    A step is a chain of small calls, and each parallel one wakes the other threads and waits for the last of them: with
    a busy neighbour that costs milliseconds a call, and more threads are slower.
    """
    given = candidates is None or (isinstance(candidates, list | tuple) and bool(candidates))
    _check.require(given, "candidates", candidates, "thread counts, or None")
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    candidates = candidates or sorted({1, max(1, cores // 2), min(cores, 16), cores})
    for count in candidates:
        # Far more threads than cores end the process: OpenMP does not survive that it cannot start one.
        _check.integer("candidates", count, 1, os.cpu_count() or 1)
    layers = [_ProbeLayer(torch.randn(1536, 576), torch.randn(576, 1536)) for _ in range(8)]
    before = torch.get_num_threads()
    ops = {str(count): functools.partial(_probe_step, layers, count) for count in candidates}
    try:
        timings = compare_ops(ops, device="cpu", min_run_s=0.1, warmup=2)
    finally:
        torch.set_num_threads(before)
    # The 90th percentile: what a stall costs, not how fast it goes without one.
    best = min(candidates, key=lambda count: timings[str(count)].p90)
    torch.set_num_threads(best)
    return best


class _ProbeLayer(NamedTuple):
    """Two matrices of the default model's MLP: 7 MB, so that eight layers pass most caches."""

    up: torch.Tensor
    down: torch.Tensor


def _probe_step(layers: list[_ProbeLayer], threads: int) -> None:
    """The shape of a decode step: a product, elementwise work on one row, a small attention, a product."""
    torch.set_num_threads(threads)
    x, cached = torch.ones(1, 576), torch.ones(1, 3, 256, 64)
    for layer in layers:
        h = F.silu(dense_linear(x, layer.up))
        F.scaled_dot_product_attention(cached[:, :, :3], cached, cached)
        x = F.rms_norm(dense_linear(h, layer.down), (576,))
