"""What `doctor` looks at: each check yields findings, and none of them changes the machine."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from labkit._paths import DATA, cache_dir
from labkit.cli.table import readable

_GIB = 2**30
# Version ranges that the course supports: at least, and below.
_SUPPORTED = {"torch": ((2, 11), None), "transformers": ((5, 17), (5, 24))}
_NEEDED_FOR_LABS = ("ipywidgets", "plotly", "anywidget", "jupyterlab", "ipykernel", "nbclient")
_MODEL_DISK_BYTES = 1.2 * _GIB  # the download, and the converted copy in float32
_MEMORY_BYTES = 6 * _GIB  # what a chapter may need at most


class Status(StrEnum):
    """A finding's verdict. A note does not stop a chapter; a FAIL does."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says what to do; `facts` are the numbers, for `--json`."""

    topic: str
    status: Status
    says: str
    advice: str = ""
    facts: dict[str, object] = field(default_factory=dict)


def python() -> Iterator[Finding]:
    """The interpreter and the system."""
    version = platform.python_version()
    says = f"Python {version}, {platform.platform()}, {sys.executable}"
    facts = {"python": version, "platform": platform.platform(), "executable": sys.executable}
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        yield Finding("system", Status.OK, says, facts=facts)
    else:
        yield Finding("system", Status.FAIL, says, "the course runs on Python 3.11 to 3.13", facts)


def _installed(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading two numbers of a version, "2.13.0+cpu" being (2, 13)."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def libraries() -> Iterator[Finding]:
    """Versions beside the supported range; what the labs need."""
    install = "pip install -r requirements.txt (or `make setup`)"
    own = DATA.parent / ".venv"
    if own.is_dir() and Path(sys.prefix).resolve() != own.resolve():
        install = "this is not the course's Python: first `source .venv/bin/activate`"
    for library, (low, high) in _SUPPORTED.items():
        version = _installed(library)
        says = f"{library} {version or 'is not installed'}"
        allowed = f"{'.'.join(map(str, low))} or later" + (f", below {'.'.join(map(str, high))}" if high else "")
        good = version is not None and low <= _numbers(version) and (high is None or _numbers(version) < high)
        advice = "" if good else f"takes {allowed}: {install}"
        yield Finding("libraries", Status.OK if good else Status.FAIL, says, advice, {library: version})
    found = {library: _installed(library) for library in _NEEDED_FOR_LABS}
    missing = [library for library, version in found.items() if version is None]
    present = ", ".join(f"{library} {version}" for library, version in found.items() if version)
    if present:
        yield Finding("notebook libraries", Status.OK, present, facts=found)
    if missing:
        yield Finding("notebook libraries", Status.FAIL, f"{', '.join(missing)} not installed", install, found)


def machine(device: str | None) -> Iterator[Finding]:
    """The device, its memory, and the memory of the host."""
    import psutil

    from labkit import hardware

    info = hardware.describe(device)
    says = f"{info.name} ({info.device}), {readable(info.memory_bytes, 'bytes')} of memory"
    says += f", {info.capability}"
    facts = {"name": info.name, "device": str(info.device), "memory_bytes": info.memory_bytes}
    facts |= {"cache_bytes": info.cache_bytes, "cores": info.cores}
    yield Finding("device", Status.OK, says, facts=facts)
    if info.kind == "cpu":
        says = "no CUDA GPU: chapters run on the CPU, with the small model"
        yield Finding("device", Status.NOTE, says)
    memory = psutil.virtual_memory()
    says = f"{readable(memory.available, 'bytes')} free of {readable(memory.total, 'bytes')}"
    enough = memory.available >= _MEMORY_BYTES
    advice = "" if enough else f"a chapter needs up to {readable(_MEMORY_BYTES, 'bytes')}: close other kernels"
    facts = {"available_bytes": memory.available, "total_bytes": memory.total}
    yield Finding("memory", Status.OK if enough else Status.NOTE, says, advice, facts)


def threads() -> Iterator[Finding]:
    """Threads that PyTorch computes with, and OpenMP's waiting, which decides what a busy neighbour costs."""
    import torch

    wait = os.environ.get("OMP_WAIT_POLICY")
    set_threads = os.environ.get("OMP_NUM_THREADS")
    says = f"{torch.get_num_threads()} threads on {os.cpu_count()} cores; OMP_WAIT_POLICY={wait or 'not set'}"
    says += f", OMP_NUM_THREADS={set_threads}" if set_threads else ""
    facts = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "OMP_WAIT_POLICY": wait}
    facts |= {"OMP_NUM_THREADS": set_threads}
    passive = (wait or "").lower() == "passive"
    advice = "" if passive else "export OMP_WAIT_POLICY=passive: spinning threads stall each other on a shared machine"
    yield Finding("threads", Status.OK if passive else Status.NOTE, says, advice, facts)


def backends() -> Iterator[Finding]:
    """Kernel backends and libraries compared with; a missing one leaves its rows out, no chapter fails for it."""
    from labkit import hardware

    for name, missing in hardware.backends().items():
        if missing is None:
            yield Finding("backends", Status.OK, f"{name} is available", facts={name: True})
        else:
            yield Finding("backends", Status.NOTE, f"{name}: {missing}", facts={name: False})


def default_model() -> Iterator[Finding]:
    """Is the default model in the cache, byte for byte as it was converted?"""
    from labkit.model_files import catalogue, fetch
    from labkit.models import DEFAULT_MODEL

    info = catalogue.find(DEFAULT_MODEL)
    folder, problem = fetch.cached(info)
    facts = {"model": info.name, "folder": str(folder or ""), "verified": folder is not None}
    if folder is not None:
        yield Finding("default model", Status.OK, f"{info.name} in {folder}, verified by SHA-256", facts=facts)
        return
    says = (
        f"{info.name} cannot be used, since {problem}" if problem else f"{info.name} is not in {fetch.model_dir(info)}"
    )
    yield Finding("default model", Status.FAIL, says, f"python -m labkit fetch {info.name}", facts)


def notebooks() -> Iterator[Finding]:
    """The notebooks, the kernel that runs them and the ledger that they write."""
    from labkit.cli.run import NOTEBOOKS
    from labkit.ledger import Ledger

    found = sorted(path.stem for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    says = f"{len(found)} chapters in {NOTEBOOKS}"
    advice = "" if found else "run from a checkout of the project, with its notebooks/ folder"
    yield Finding("notebooks", Status.OK if found else Status.FAIL, says, advice, {"chapters": found})
    try:
        from jupyter_client.kernelspec import KernelSpecManager

        kernels = sorted(KernelSpecManager().find_kernel_specs())
    except ImportError:
        kernels = []
    good = "python3" in kernels
    says = f"kernels: {', '.join(kernels) or 'none'}"
    advice = "" if good else "python -m ipykernel install --sys-prefix"
    yield Finding("notebooks", Status.OK if good else Status.FAIL, says, advice, {"kernels": kernels})
    try:
        path = Ledger().path
    except ValueError as error:
        yield Finding("notebooks", Status.FAIL, f"ledger: {error}", "set LABKIT_LEDGER to a file that can be written")
        return
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    writable = os.access(nearest, os.W_OK) and (nearest == path or nearest.is_dir())
    advice = "" if writable else "set LABKIT_LEDGER to a file that can be written"
    yield Finding("notebooks", Status.OK if writable else Status.FAIL, f"ledger {path}", advice, {"ledger": str(path)})


def disk() -> Iterator[Finding]:
    """Room in the cache's file system."""
    folder = cache_dir()
    free = shutil.disk_usage(folder).free
    says = f"{readable(free, 'bytes')} free in {folder}"
    enough = free >= _MODEL_DISK_BYTES
    advice = "" if enough else f"the model takes {readable(_MODEL_DISK_BYTES, 'bytes')}: free some, or set LABKIT_CACHE"
    yield Finding(
        "disk", Status.OK if enough else Status.NOTE, says, advice, {"free_bytes": free, "cache": str(folder)}
    )


def ceilings(device: str | None) -> Iterator[Finding]:
    """Measured ceilings beside the datasheet's. Half of the datasheet is where something else must be going on."""
    from labkit import hardware

    measured, sheet = hardware.measure_ceilings(device), hardware.datasheet(device)
    rows = [("read bandwidth", measured.read_bandwidth, sheet and sheet.memory_bandwidth, "bytes/s")]
    rows.append(("copy bandwidth", measured.copy_bandwidth, sheet and sheet.memory_bandwidth, "bytes/s"))
    for dtype, rate in measured.matmul_flops.items():
        name = str(dtype).removeprefix("torch.")
        rows.append((f"matmul {name}", rate, sheet and sheet.matmul_flops.get(dtype), "FLOP/s"))
    for name, rate, peak, unit in rows:
        says = f"{name} {readable(rate, unit)} measured"
        if peak:
            says += f", {readable(peak, unit)} in the datasheet ({rate / peak:.0%})"
        slow = bool(peak) and rate < 0.5 * peak
        advice = "less than half: is something else running on this device?" if slow else ""
        facts = {"measured": rate, "datasheet": peak, "unit": unit}
        yield Finding("ceilings", Status.NOTE if slow else Status.OK, says, advice, facts)
    if sheet is None and hardware.describe(device).kind == "cuda":
        yield Finding("ceilings", Status.NOTE, "no datasheet row for this device in data/gpus.yaml: measured only")
