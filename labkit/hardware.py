"""What machine this is, what its maker says it can do, and what it does when measured.

A roofline (Williams, Waterman and Patterson, CACM 2009) needs two ceilings: bytes/s of memory and FLOP/s of a matmul.
Here they are measured; the datasheet stands beside them.
"""

import functools
import importlib.util
import re
from dataclasses import dataclass

import torch
import yaml

from labkit import _check
from labkit._paths import DATA
from labkit._threads import set_threads
from labkit.ceilings import Ceilings, measure_ceilings, measured_dtypes
from labkit.devices import DeviceInfo, describe, detect_device
from labkit.measure import device_name

__all__ = [
    "Ceilings",
    "Datasheet",
    "DeviceInfo",
    "backends",
    "datasheet",
    "datasheet_by_name",
    "describe",
    "detect_device",
    "installed",
    "measure_ceilings",
    "measured_dtypes",
    "set_threads",
    "why_not_installed",
]


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


# What each optional backend is imported as, and how to get it where it can be had.
_OPTIONAL = {
    "triton": ("triton", "pip install -r requirements.txt on Linux"),
    "flash-attn": ("flash_attn", "pip install flash-attn --no-build-isolation, with nvcc and a GPU"),
    "flash-attn-4": (
        "flash_attn.cute",
        'pip install "flash-attn-4[cu13]" (without [cu13] for CUDA 12), for Hopper and Blackwell GPUs',
    ),
    "gptqmodel": ("gptqmodel", "an environment of its own (chapter 02)"),
    "auto-gptq": ("auto_gptq", "an environment of its own with transformers 4.51 (chapter 02)"),
    "autoawq": ("awq", "an environment of its own with transformers 4.51 (chapter 02)"),
}


def installed(module: str) -> bool:
    """Whether a module can be imported. A folder without code of its own, which another distribution's package may
    leave under the same name, is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the package that it would lie in
        return False
    return spec is not None and spec.origin is not None


def why_not_installed(name: str) -> str | None:
    """Why an optional backend of `backends` cannot be imported, with how to get it; None where it can."""
    module, how = _OPTIONAL[_check.choice("name", name, list(_OPTIONAL))]
    return None if installed(module) else f"not installed; {how}"


def backends() -> dict[str, str | None]:
    """Each backend by name: None where it can be used here, else one line that says why not and how to get it."""
    gpu = None if torch.cuda.is_available() else "no CUDA device was found by torch"
    found: dict[str, str | None] = {"torch": None, "cuda": gpu}
    found |= {name: why_not_installed(name) for name in _OPTIONAL}
    if found["triton"] is None and gpu:
        found["triton"] = f"installed, but {gpu}; its kernels run here under TRITON_INTERPRET=1 only"
    return found
