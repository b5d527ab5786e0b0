"""The steps that `flash_attention_lab` runs: one call of each implementation, clocked in turn, and its memory."""

from __future__ import annotations

import functools
import textwrap
import time
from collections.abc import Callable, Mapping

import torch

from labkit.attention.implementations import run_attention
from labkit.kernels import BackendUnavailable, flash_attention
from labkit.kernels.flash_attention import tiles
from labkit.labs._flash_attention_costs import predicted_peak
from labkit.labs._flash_attention_result import FlashAttentionParams
from labkit.labs._result import si
from labkit.measure import Timing, compare_ops, peak_memory, synchronize

Cancelled = Callable[[], bool]
Op = Callable[[], torch.Tensor]

_HEADROOM = 0.9  # of the memory that is free
# Standard attention takes its softmax in float32 and adds a mask: up to so many matrices of float32 at once.
_MATRICES, _MATRIX_BYTES = 3, 4
# A round calls each once. As many rounds as fit into the time that is given, within these.
_FEWEST_ROUNDS, _MOST_ROUNDS, _SAMPLES = 3, 7, 5
_SHORTEST_S = 1e-4
_LONGEST_LINE = 200
# A tile in plain PyTorch is some ten calls. More of them than this are not run here, nor is their memory recorded:
# the profiler keeps every one of those calls.
_MOST_TILES = {"clocked": 9000, "recorded": 2100}


def make_inputs(params: FlashAttentionParams, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Random q `(1, num_attention_heads, seq_len, head_dim)` and k, v `(1, num_key_value_heads, seq_len, head_dim)`."""
    generator = torch.Generator(device).manual_seed(0)
    counts = (params.num_attention_heads, params.num_key_value_heads, params.num_key_value_heads)
    look = {"dtype": getattr(torch, params.dtype), "device": device, "generator": generator}
    return tuple(torch.randn(1, count, params.seq_len, params.head_dim, **look) for count in counts)


def make_op(name: str, params: FlashAttentionParams, inputs: tuple[torch.Tensor, ...]) -> Op:
    """One call of the implementation of this name, at its own block sizes."""
    return functools.partial(run_attention, name, *inputs, causal=params.causal)


def make_ops(params: FlashAttentionParams, inputs: tuple[torch.Tensor, ...]) -> dict[str, Op]:
    """One call of each role."""
    ops = {role: make_op(params.implementation(role), params, inputs) for role in ("standard", "native")}
    blocks = {"block_sizes": params.block_sizes, "backend": params.kernel}
    return ops | {"own": functools.partial(flash_attention, *inputs, causal=params.causal, **blocks)}


def tile_count(params: FlashAttentionParams) -> int:
    """Tiles that the course's kernel visits, for each head."""
    return tiles.tile_count(params.seq_len, params.seq_len, params.block_sizes, params.causal)


def needed_bytes(params: FlashAttentionParams, role: str) -> int:
    """What a call may take at most, to be told before it is made."""
    if role != "standard":
        return predicted_peak(params, role)
    return params.output_bytes + _MATRICES * _MATRIX_BYTES * params.shape.matrix_elements


def why_not(params: FlashAttentionParams, role: str, free_bytes: int, lengths: tuple[int, ...]) -> str:
    """Why this role is not run at this setting, with the numbers; empty where it can be. Of `lengths` the longest that
    fits is named."""
    room, needs = _HEADROOM * free_bytes, needed_bytes(params, role)
    if needs > room:
        fits = max((n for n in lengths if needed_bytes(params.at(n), role) <= room), default=None)
        most = f"fits up to {fits:,} tokens" if fits else "fits at no length"
        return f"does not fit: takes up to {si(needs, 'B')} where {si(free_bytes, 'B')} are free; {most}"
    count = tile_count(params)
    if role == "own" and params.kernel == "tiled" and count > _MOST_TILES["clocked"]:
        return f"not run: {count:,} tiles in plain PyTorch would take long; larger blocks are fewer"
    return ""


def why_not_recorded(params: FlashAttentionParams, role: str) -> str:
    """Why this role's memory is not recorded; empty where it is."""
    count = tile_count(params)
    if role == "own" and params.kernel == "tiled" and count > _MOST_TILES["recorded"]:
        return f"{count:,} tiles are too many to record"
    return ""


def once(op: Op, device: torch.device) -> float:
    """Seconds of one call."""
    synchronize(device)
    begin = time.perf_counter()
    op()
    synchronize(device)
    return time.perf_counter() - begin


def try_once(op: Op, device: torch.device) -> tuple[torch.Tensor, float] | str:
    """Its output and the seconds of a call after the first, which warms it up; why it cannot run where it says so."""
    try:
        output = op()
    except BackendUnavailable as error:
        return str(error)
    return output, once(op, device)


def failure(error: Exception, device: torch.device) -> str:
    """What a call failed with, in one line; what it left in the GPU's cache is given back."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError | MemoryError) else type(error).__name__
    return textwrap.shorten(f"{kind}: {error}", _LONGEST_LINE, placeholder=" ...")


def clock(
    ops: Mapping[str, Op], device: torch.device, budget_s: float, cancelled: Cancelled
) -> dict[str, Timing] | None:
    """Timings of ops that are warm, A B A B, for about `budget_s` seconds; None when cancelled in between."""
    first = {}
    for name, op in ops.items():
        if cancelled():
            return None
        first[name] = once(op, device)
    total = sum(max(seconds, _SHORTEST_S) for seconds in first.values())
    if (_SAMPLES + 1) * total <= budget_s:
        # `compare_ops` goes on until the quickest has run so long.
        least = budget_s / total * max(min(first.values()), _SHORTEST_S)
        return compare_ops(ops, device=device, min_run_s=least, warmup=0)
    samples = {name: [seconds] for name, seconds in first.items()}
    for _ in range(max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(budget_s / total))) - 1):
        for name, op in ops.items():
            if cancelled():
                return None
            samples[name].append(once(op, device))
    return {name: Timing.of(seconds) for name, seconds in samples.items()}


def peak_of(op: Op, device: torch.device) -> int:
    """Bytes that one call takes at its highest, above its inputs."""
    with torch.no_grad():
        return peak_memory(op, device=device)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of two outputs, in float32."""
    return (a.float() - b.float()).abs().max().item()
