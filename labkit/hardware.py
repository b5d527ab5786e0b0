"""What machine this is, what its maker says it can do, and what it does when measured.

A roofline (Williams, Waterman and Patterson, CACM 2009) needs two ceilings: bytes/s of memory and FLOP/s of a matmul.
Here they are measured; the datasheet stands beside them.
"""

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import yaml

from labkit import _check
from labkit._paths import DATA
from labkit._threads import set_threads
from labkit.measure import Timing, compare_ops, device_name, time_op

__all__ = [
    "Ceilings",
    "Datasheet",
    "DeviceInfo",
    "backends",
    "datasheet",
    "datasheet_by_name",
    "describe",
    "detect_device",
    "measure_ceilings",
    "measured_dtypes",
    "set_threads",
]


def detect_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return _check.device("device", None)


@dataclass(frozen=True)
class DeviceInfo:
    """A device as this machine reports it; `cache_bytes` is the last cache before memory, `None` where unknown.

    `free_bytes` is what a tensor may still take: on a GPU with what PyTorch's allocator holds and does not use.
    """

    device: torch.device
    name: str
    kind: str
    memory_bytes: int
    free_bytes: int
    cache_bytes: int | None
    cores: int
    threads: int
    capability: str


def _cpu_cache_bytes() -> int | None:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]])
    return max(sizes, default=None)


def describe(device: torch.device | str | None = None) -> DeviceInfo:
    """Name, memory, last-level cache, cores (streaming multiprocessors on a GPU) and capability of a device."""
    device = _check.device("device", device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        # The driver counts a freed tensor's memory as taken while the allocator keeps it for the next one.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        capability = f"sm_{properties.major}{properties.minor}"
        cores = properties.multi_processor_count
        return DeviceInfo(device, properties.name, "cuda", total, free, properties.L2_cache_size, cores, 0, capability)
    memory = psutil.virtual_memory()
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    free, cache = memory.available, _cpu_cache_bytes()
    name, threads = device_name(device), torch.get_num_threads()
    return DeviceInfo(device, name, "cpu", memory.total, free, cache, cores, threads, capability)


@dataclass(frozen=True)
class Datasheet:
    """What the maker states: bytes/s, dense FLOP/s by dtype, bytes; `source` says where it was read."""

    name: str
    memory_bandwidth: float
    matmul_flops: dict[torch.dtype, float]
    memory_bytes: int
    l2_bytes: int | None
    shared_memory_bytes: int | None
    source: str


@functools.cache
def _gpu_table() -> list[dict]:
    return yaml.safe_load((DATA / "gpus.yaml").read_text())["gpus"]


def datasheet(device: torch.device | str | None = None) -> Datasheet | None:
    """The datasheet of a GPU in `data/gpus.yaml`, by its name; None for a CPU and for a GPU that is not listed."""
    device = _check.device("device", device)
    return datasheet_by_name(device_name(device)) if device.type == "cuda" else None


def datasheet_by_name(name: str) -> Datasheet | None:
    """As `datasheet`, for a name as `torch.cuda.get_device_name` gives it, such as "NVIDIA H200"."""
    _check.require(isinstance(name, str), "name", name, "a device's name")
    for gpu in _gpu_table():
        if any(re.search(pattern, name) for pattern in gpu["match"]):
            flops = {getattr(torch, key): value for key, value in gpu["matmul_flops"].items() if hasattr(torch, key)}
            sizes = gpu["memory_bytes"], gpu.get("l2_bytes"), gpu.get("shared_memory_bytes")
            return Datasheet(gpu["name"], gpu["memory_bandwidth"], flops, *sizes, gpu["source"])
    return None


@dataclass(frozen=True)
class Ceilings:
    """Measured on `device_name` with `threads` CPU threads: bytes/s read, bytes/s copied (read plus written), and
    FLOP/s of a square matmul by dtype. `details` holds the Timing and size behind each."""

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
    """Measure a device's ceilings: a second or two, once per process, device and thread count.

    Bandwidths are the best of their probes' medians. `progress` is called with what runs now. `refresh` measures anew.
    """
    device = _check.device("device", device)
    _check.number("min_run_s", min_run_s, 0.0)
    key = (str(device), torch.get_num_threads())
    if key in _measured and not refresh:
        return _measured[key]
    tell = progress or (lambda _: None)
    tell("memory bandwidth")
    details = _bandwidths(device, min_run_s)
    flops = {}
    for dtype in measured_dtypes(device):
        name = str(dtype).removeprefix("torch.")
        tell(f"{name} matmul")
        details[f"{name} matmul"] = work, timing = _matmul(device, dtype, min_run_s)
        flops[dtype] = work / timing.median
    rate = {name: amount / timing.median for name, (amount, timing) in details.items()}
    read = max(rate["read by sum"], rate["read by dot"])
    _measured[key] = Ceilings(read, rate["copy"], flops, device_name(device), torch.get_num_threads(), details)
    return _measured[key]


# What each optional backend is imported as, and how to get it where it can be had.
_OPTIONAL = {
    "triton": ("triton", "pip install -r requirements.txt on Linux"),
    "flash-attn": ("flash_attn", "pip install flash-attn --no-build-isolation, with nvcc and a GPU"),
    "gptqmodel": ("gptqmodel", "an environment of its own (chapter 02)"),
    "auto-gptq": ("auto_gptq", "an environment of its own with transformers 4.51 (chapter 02)"),
    "autoawq": ("awq", "an environment of its own with transformers 4.51 (chapter 02)"),
}


def backends() -> dict[str, str | None]:
    """Each backend by name: None where it can be used here, else one line that says why not and how to get it."""
    gpu = None if torch.cuda.is_available() else "no CUDA device was found by torch"
    found: dict[str, str | None] = {"torch": None, "cuda": gpu}
    for name, (module, how) in _OPTIONAL.items():
        found[name] = None if importlib.util.find_spec(module) else f"not installed; {how}"
    if found["triton"] is None and gpu:
        found["triton"] = f"installed, but {gpu}; its kernels run here under TRITON_INTERPRET=1 only"
    return found
