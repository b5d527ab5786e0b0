"""The two ceilings of a roofline, measured: bytes/s of memory and FLOP/s of a matmul by dtype."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit import _check
from labkit.devices import describe
from labkit.measure import Timing, compare_ops, time_op


@dataclass(frozen=True)
class Ceilings:
    """Measured on `device_name`, asked for with `threads` CPU threads set: bytes/s read, bytes/s copied (read plus
    written), FLOP/s of a square matmul by dtype. `details` holds the bytes or FLOPs and the Timing behind each."""

    read_bandwidth: float
    copy_bandwidth: float
    matmul_flops: dict[torch.dtype, float]
    device_name: str
    threads: int
    details: dict[str, tuple[int, Timing]]


def _bandwidths(device: torch.device, min_run_s: float) -> dict[str, tuple[int, Timing]]:
    """Bytes moved and Timing of a read and of a copy over more than four times the last cache."""
    info = describe(device)
    cache = info.cache_bytes or 2**25
    size = min(max(8 * cache, 2**28), info.free_bytes // 4)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source[: source.numel() // 2])
    half = source[: target.numel()]
    # Two ways to read everything once: whichever the library does better is the nearer to the memory's own limit.
    ops = {
        "read by sum": source.sum,
        "read by dot": lambda: torch.dot(half, source[target.numel() : 2 * target.numel()]),
        "copy": lambda: target.copy_(half),
    }
    timings = compare_ops(ops, device=device, min_run_s=min_run_s, warmup=2)
    moved = {"read by sum": source.nbytes, "read by dot": 2 * half.nbytes, "copy": 2 * half.nbytes}
    return {name: (moved[name], timing) for name, timing in timings.items()}


def _time_matmul(device: torch.device, dtype: torch.dtype, size: int, min_run_s: float) -> Timing:
    # Random values: a chip can run faster on zeros than on data.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return time_op(lambda: torch.mm(a, b, out=out), device=device, min_run_s=min_run_s, warmup=1)


def _matmul(device: torch.device, dtype: torch.dtype, min_run_s: float) -> tuple[int, Timing]:
    """FLOPs and Timing of the first square matmul that takes some milliseconds: a smaller one is all overhead."""
    size, largest = (1024, 8192) if device.type == "cuda" else (256, 2048)
    shortest_s = 1e-3 if device.type == "cuda" else 8e-3
    while size < largest and _time_matmul(device, dtype, size, 0.0).median < shortest_s:
        size *= 2
    return 2 * size**3, _time_matmul(device, dtype, size, min_run_s)


def measured_dtypes(device: torch.device) -> list[torch.dtype]:
    """The dtypes whose matmul is measured: float16 on a GPU only, since a CPU without it runs a thousandth as fast."""
    device = _check.device("device", device)
    dtypes = [torch.float32, torch.bfloat16]
    return [*dtypes, torch.float16] if device.type == "cuda" else dtypes


_measured: dict[tuple[str, int], Ceilings] = {}


def measure_ceilings(
    device: torch.device | str | None = None,
    *,
    min_run_s: float = 0.15,
    progress: Callable[[str], None] | None = None,
    refresh: bool = False,
) -> Ceilings:
    """Measure a device's ceilings: some seconds, once per process, device and thread count.

    Each is the best median of its probes; on a CPU the probes run with the threads that are set and with all cores,
    since a ceiling is the machine's, whatever a step makes of it. `progress` is called with what runs now. `refresh`
    measures anew.
    """
    device = _check.device("device", device)
    _check.number("min_run_s", min_run_s, 0.0)
    takes = "a function of what runs now, or None"
    _check.require(progress is None or callable(progress), "progress", progress, takes)
    threads = torch.get_num_threads()
    key = (str(device), threads)
    if key not in _measured or refresh:
        info = describe(device)
        counts = {threads, info.cores} if device.type == "cpu" else {threads}
        try:
            probes = [_probe(device, min_run_s, count, progress or (lambda _: None)) for count in sorted(counts)]
        finally:
            torch.set_num_threads(threads)
        _measured[key] = _highest(probes, info.name, threads)
    return _measured[key]


Probe = dict[str, tuple[int, Timing]]


def _probe(device: torch.device, min_run_s: float, threads: int, tell: Callable[[str], None]) -> Probe:
    """Every probe with one thread count: bytes or FLOPs of a call, and its Timing, by name."""
    torch.set_num_threads(threads)
    tell("memory bandwidth")
    probe = _bandwidths(device, min_run_s)
    for dtype in measured_dtypes(device):
        name = str(dtype).removeprefix("torch.")
        tell(f"{name} matmul")
        probe[f"{name} matmul"] = _matmul(device, dtype, min_run_s)
    return probe


def _highest(probes: list[Probe], name: str, threads: int) -> Ceilings:
    """The best of several thread counts, probe by probe."""

    def rate(found: tuple[int, Timing]) -> float:
        return found[0] / found[1].median

    details = {what: max((probe[what] for probe in probes), key=rate) for what in probes[0]}
    matmuls = {what.removesuffix(" matmul"): found for what, found in details.items() if what.endswith(" matmul")}
    flops = {getattr(torch, dtype): rate(found) for dtype, found in matmuls.items()}
    read = max(rate(details["read by sum"]), rate(details["read by dot"]))
    return Ceilings(read, rate(details["copy"]), flops, name, threads, details)
