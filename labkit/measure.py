"""Timing and peak memory.

Timings warm up, synchronise on both sides of the clock, repeat, and report the median with the 10th and 90th
percentile. Whoever times holds the device's lock, so that learners on one device take turns.
"""

import contextlib
import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit import _check
from labkit._compat import quiet_profiler
from labkit._lock import device_lock
from labkit.ledger import Label, Ledger, Measurement, device_name, library_versions

__all__ = [
    "Label",
    "Ledger",
    "Measurement",
    "Peak",
    "Timing",
    "compare_ops",
    "device_lock",
    "device_name",
    "library_versions",
    "peak_memory",
    "synchronize",
    "time_op",
    "track_peak",
]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: median, 10th and 90th percentile over `n` samples."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, seconds: list[float]) -> "Timing":
        """From samples; a percentile is the nearest sample at or above its rank."""
        _check.require(isinstance(seconds, list) and bool(seconds), "seconds", seconds, "a list of at least one sample")
        ordered = sorted(_check.number("seconds", sample) for sample in seconds)

        def at(q: float) -> float:
            return ordered[max(0, math.ceil(q * len(ordered)) - 1)]

        return cls(at(0.5), at(0.1), at(0.9), len(ordered))


def synchronize(device: torch.device) -> None:
    """Wait for the device's queue; nothing to wait for on a CPU."""
    _check.require(isinstance(device, torch.device), "device", device, "a torch.device")
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sample(fn: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds a call over `calls` back-to-back calls: by CUDA events on a GPU, by the clock on a CPU."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(calls):
            fn()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - begin) / calls


# A shorter sample is mostly the clock's own cost, so short calls are timed several at a time; on a GPU also what Python
# takes before the first kernel starts, some 100 µs, which later calls hide behind the kernel before.
_SHORTEST_SAMPLE_S = {"cpu": 1e-4, "cuda": 5e-3}
_MIN_SAMPLES = 5


def compare_ops(
    ops: Mapping[str, Callable[[], object]],
    *,
    device: torch.device | str | None = None,
    min_run_s: float = 0.2,
    warmup: int = 3,
    on_wait: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time several calls in turn, A B A B, so that drift of the machine falls on all of them alike.

    Each is called until it has run for `min_run_s` seconds and at least 5 samples are in. Returns a Timing by name.
    """
    device = _check.device("device", device)
    _check.require(isinstance(ops, Mapping) and bool(ops), "ops", ops, "at least one function by name")
    for name, fn in ops.items():
        _check.require(callable(fn), f"ops[{name!r}]", fn, "a function of no arguments")
    _check.number("min_run_s", min_run_s, 0.0)
    _check.integer("warmup", warmup, 0)
    _check.require(on_wait is None or callable(on_wait), "on_wait", on_wait, "a function of no arguments, or None")
    with device_lock(device, on_wait):
        calls = {}
        for name, fn in ops.items():
            for _ in range(warmup):
                fn()
            calls[name] = max(1, math.ceil(_SHORTEST_SAMPLE_S[device.type] / max(_sample(fn, device, 1), 1e-9)))
        samples: dict[str, list[float]] = {name: [] for name in ops}
        spent = dict.fromkeys(ops, 0.0)
        while min(spent.values()) < min_run_s or min(len(s) for s in samples.values()) < _MIN_SAMPLES:
            for name, fn in ops.items():
                seconds = _sample(fn, device, calls[name])
                samples[name].append(seconds)
                spent[name] += seconds * calls[name]
    return {name: Timing.of(seconds) for name, seconds in samples.items()}


def time_op(
    fn: Callable[[], object],
    *,
    device: torch.device | str | None = None,
    min_run_s: float = 0.2,
    warmup: int = 3,
    on_wait: Callable[[], None] | None = None,
) -> Timing:
    """Seconds of one call of `fn`, on a warmed-up device that nobody else is measuring on.

    `on_wait` is called when another measurement holds the device. Errors: ValueError for arguments; what `fn` raises.
    """
    _check.require(callable(fn), "fn", fn, "a function of no arguments")
    return compare_ops({"op": fn}, device=device, min_run_s=min_run_s, warmup=warmup, on_wait=on_wait)["op"]


def _cpu_peak(fn: Callable[[], object]) -> int:
    """The highest running total of the CPU allocator's events, as the profiler records them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quiet_profiler(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = fn()
    del result
    live = peak = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def peak_memory(fn: Callable[[], object], *, device: torch.device | str | None = None) -> int:
    """Bytes that `fn` adds, at its highest, to what was allocated when it began; what it returns counts.

    On a GPU this is the caching allocator's peak. On a CPU it is the profiler's record of every tensor allocation, so
    that it is exact and repeatable; memory that a library takes outside PyTorch's allocator is not in it.
    """
    device = _check.device("device", device)
    _check.require(callable(fn), "fn", fn, "a function of no arguments")
    with device_lock(device):
        gc.collect()
        if device.type != "cuda":
            return _cpu_peak(fn)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fn()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before


@dataclass
class Peak:
    """Filled in when the `track_peak` block ends: bytes in use at its highest, None where the system does not tell."""

    bytes: int | None = None


@contextlib.contextmanager
def track_peak(device: torch.device | str | None = None) -> Iterator[Peak]:
    """All memory in use at the highest point of a block: the allocator's on a GPU, the process's resident set on a CPU.

    Linux resets a process's own high-water mark when 5 is written to `/proc/self/clear_refs` (proc(5)).
    """
    device = _check.device("device", device)
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    yield peak
    if device.type == "cuda":
        peak.bytes = torch.cuda.max_memory_allocated(device)
    else:
        with contextlib.suppress(OSError):
            status = Path("/proc/self/status").read_text()
            peak.bytes = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
