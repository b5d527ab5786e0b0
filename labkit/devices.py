"""The device and the machine around it: name, memory, cache, cores."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from labkit import _check
from labkit.ledger import device_name


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


def _host_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Bytes in all and bytes that can still be had; in a container with a limit of its own (cgroup v2), within that."""
    memory = psutil.virtual_memory()
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text())  # "max" where there is none
        used = int((cgroup / "memory.current").read_text())
        # File pages that nothing has touched lately count as used, and go as soon as the room is needed.
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = limit - used + int(stat.get("inactive_file", 0))
        return min(limit, memory.total), max(0, min(free, memory.available))
    return memory.total, memory.available


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
    total, free = _host_memory()
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    capability = torch.backends.cpu.get_cpu_capability()
    name, threads, cache = device_name(device), torch.get_num_threads(), _cpu_cache_bytes()
    return DeviceInfo(device, name, "cpu", total, free, cache, cores, threads, capability)
