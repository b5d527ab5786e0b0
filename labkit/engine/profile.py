"""Where a step's time goes: the real step, with a clock after each op."""

import time
from collections.abc import Callable

import torch

from labkit import _check
from labkit._compat import quiet_profiler
from labkit.engine.decode import Decoder
from labkit.measure import Timing, device_lock, synchronize

# Long enough for the host to queue a whole step behind it, so that an event stands at its kernel's end, not at the
# moment when the host got round to launching it.
_HEAD_START_CYCLES = 100_000_000

_VIEWS = {
    f"aten::{name}"
    for name in "alias as_strided chunk detach expand flatten narrow permute reshape select slice split squeeze t "
    "transpose unflatten unsqueeze view".split()
}


class _HostClock:
    """Marks by the clock: right where an op has finished when its call returns, as on a CPU."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        self.marks.append((name, time.perf_counter()))

    def seconds(self) -> list[tuple[str, float]]:
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(name, after - before) for (_, before), (name, after) in pairs]


class _EventClock:
    """Marks by CUDA events on a stream that is kept busy until the whole step is queued."""

    def __init__(self) -> None:
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self.marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def seconds(self) -> list[tuple[str, float]]:
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(name, before.elapsed_time(after) / 1e3) for (_, before), (name, after) in pairs]


def op_times(decoder: Decoder, tokens: torch.Tensor, *, repeats: int = 5, warmup: int = 1) -> dict[str, Timing]:
    """Seconds of each op of one step of `tokens (batch, q_len)` on top of what the cache holds, summed over layers.

    Names are those of `labkit.roofline.op_costs`. Each repeat runs the whole step, so that every weight comes from
    memory as it does in decoding, and is then cropped away. The ops do not run from a CUDA graph here.
    """
    _check.require(isinstance(decoder, Decoder), "decoder", type(decoder).__name__, "a Decoder")
    _check.integer("repeats", repeats, 1)
    _check.integer("warmup", warmup, 0)
    held = decoder.lengths if decoder.length else 0
    samples: dict[str, list[float]] = {}
    with device_lock(decoder.device):
        for repeat in range(warmup + repeats):
            synchronize(decoder.device)
            clock = _EventClock() if decoder.device.type == "cuda" else _HostClock()
            decoder.forward(tokens, logits_to_keep=1, mark=clock.mark)
            decoder.crop(held)
            step: dict[str, float] = {}
            for name, seconds in clock.seconds():
                step[name] = step.get(name, 0.0) + seconds
            if repeat >= warmup:
                for name, seconds in step.items():
                    samples.setdefault(name, []).append(seconds)
    return {name: Timing.of(seconds) for name, seconds in samples.items()}


def count_launches(fn: Callable[[], object]) -> int:
    """Kernels that one call of `fn` launches on a GPU; on a CPU, the library calls it makes that do any work.

    Views and other calls that only look at a tensor's shape are not counted, nor are calls made by a counted one.
    """
    _check.require(callable(fn), "fn", fn, "a function of no arguments")
    on_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    fn()
    with quiet_profiler(), torch.profiler.profile(activities=[activity]) as profile:
        fn()
        if on_gpu:
            torch.cuda.synchronize()
    if on_gpu:
        kernels = (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
        return sum("Memcpy" not in event.name and "Memset" not in event.name for event in kernels)
    calls = (event for event in profile.events() if event.name.startswith("aten::") and event.cpu_parent is None)
    return sum(event.name not in _VIEWS for event in calls)
