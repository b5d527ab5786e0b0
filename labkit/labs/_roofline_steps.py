"""The steps that `roofline_lab` runs: whether they fit, how long a prompt may be, and their times. No widgets here."""

import time
from collections.abc import Callable

import torch

from labkit.engine import Decoder, op_times
from labkit.hardware import Ceilings
from labkit.labs._result import si
from labkit.labs._roofline_result import OpPoint, PhaseResult, RooflineParams
from labkit.measure import Timing, synchronize
from labkit.roofline import OpCost, memory_bytes, op_costs, time_floor

# One prefill may take this long by the roof; a longer prompt is cut, and the lab says so.
_PREFILL_FLOOR_S = 0.7
# Time for the repeats of a whole step, and again for the step op by op; slow steps run a few times all the same. A GPU
# queues each clocked step behind a pause, which costs more than the step.
_REPEATS_S = {"cpu": 0.35, "cuda": 0.08}
_MOST_CLOCKED = {"cpu": 7, "cuda": 3}
_LEAST_REPEATS = {"decode": 3, "prefill": 2}
_HEADROOM = 0.9  # of the memory that is free


def refuse_if_too_large(config: object, params: RooflineParams, free_bytes: int) -> None:
    """ValueError with the bytes and a batch or a length that would fit. The weights are loaded already."""

    def needed(batch: int, seq_len: int) -> int:
        memory = memory_bytes(config, params.dtype, batch, seq_len, q_len=1)
        return memory.total - memory.weights

    def largest(value: int, bytes_at: Callable[[int], int]) -> int:
        while value > 0 and bytes_at(value) > _HEADROOM * free_bytes:
            value //= 2
        return value

    batch = largest(params.batch, lambda value: needed(value, params.seq_len))
    if batch == params.batch:
        return
    seq_len = largest(params.seq_len, lambda value: needed(params.batch, value))
    raise ValueError(
        f"batch: got {params.batch} with seq_len {params.seq_len} in {params.dtype}, which needs "
        f"{si(needed(params.batch, params.seq_len), 'B')} beside the weights where {si(free_bytes, 'B')} are free; "
        f"takes at most batch {batch} at this length, or length {seq_len} at this batch"
    )


def cut_prompt(config: object, params: RooflineParams, ceilings: Ceilings) -> tuple[int, tuple[OpCost, ...]]:
    """The prompt's length, halved until the roof lets it run within the budget; the whole's costs if it was."""

    def costs(length: int) -> list[OpCost]:
        return op_costs(config, batch=1, q_len=length, kv_len=length, dtype=params.dtype, logits_to_keep=1)

    length = params.seq_len
    while length > 16 and time_floor(costs(length), ceilings, params.dtype) > _PREFILL_FLOOR_S:
        length //= 2
    return length, tuple(costs(params.seq_len)) if length < params.seq_len else ()


def measure_step(
    name: str, decoder: Decoder, size: tuple[int, int], ceilings: Ceilings, cancelled: Callable[[], bool]
) -> PhaseResult | None:
    """Time one step of `size` (batch, q_len) on top of what the decoder holds; None when cancelled.

    `name` is the phase's, decode or prefill.
    """
    config, (batch, q_len), kind = decoder.model.config, size, decoder.device.type
    kv_len, dtype = decoder.length + q_len, decoder.dtype
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, size, generator=generator).to(decoder.device)
    steps = _time_steps(decoder, tokens, _LEAST_REPEATS[name], cancelled)
    if steps is None or cancelled():
        return None
    repeats = min(_MOST_CLOCKED[kind], max(1, int(_REPEATS_S[kind] / steps.median)))
    seconds = op_times(decoder, tokens, repeats=repeats, warmup=0)
    costs = op_costs(config, batch=batch, q_len=q_len, kv_len=kv_len, dtype=dtype, logits_to_keep=1)
    ops = tuple(OpPoint(cost, seconds[cost.name], time_floor(cost, ceilings, dtype)) for cost in costs)
    return PhaseResult(name, batch, q_len, kv_len, steps, ops)


def _time_steps(decoder: Decoder, tokens: torch.Tensor, least: int, cancelled: Callable[[], bool]) -> Timing | None:
    """Seconds of whole steps, each cropped away again, after one to warm up; None when cancelled in between."""
    length = decoder.length
    samples: list[float] = []
    warm, budget = False, _REPEATS_S[decoder.device.type]
    while len(samples) < least or (sum(samples) < budget and len(samples) < 50):
        if cancelled():
            return None
        synchronize(decoder.device)
        begin = time.perf_counter()
        decoder.forward(tokens, logits_to_keep=1)
        synchronize(decoder.device)
        if warm:
            samples.append(time.perf_counter() - begin)
        warm = True
        decoder.crop(length)
    return Timing.of(samples)
