"""What the machine is, and its measured ceilings beside the datasheet."""

import platform
import subprocess

from labkit.cli.gpu_sections import Recorder

# Read only: the card's settings are left as they are found.
_ASKED = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,temperature.gpu"


def environment(recorder: Recorder) -> None:
    """Chip, driver, library versions, backends."""
    import torch

    from labkit import hardware
    from labkit.measure import library_versions

    info = hardware.describe(recorder.device)
    recorder.record("device", info.name)
    recorder.record("memory_bytes", info.memory_bytes)
    recorder.record("platform", platform.platform())
    recorder.record("versions", library_versions() | {"cuda": torch.version.cuda})
    recorder.record("backends", hardware.backends())
    if info.kind != "cuda":
        return
    properties = torch.cuda.get_device_properties(recorder.device)
    recorder.record("capability", f"{properties.major}.{properties.minor}")
    recorder.record("multiprocessors", properties.multi_processor_count)
    recorder.record("l2_bytes", properties.L2_cache_size)
    recorder.record("nvidia_smi", _nvidia_smi())


def _nvidia_smi() -> dict[str, str]:
    """The driver's own account of the first GPU; empty where the tool is not installed."""
    command = ["nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_ASKED.split(","), (cell.strip() for cell in answer.splitlines()[0].split(",")), strict=False))


def ceilings(recorder: Recorder) -> None:
    """Bandwidth and matmul rates, each with its share of the datasheet where there is a row for the chip."""
    from labkit import hardware

    measured, sheet = hardware.measure_ceilings(recorder.device), hardware.datasheet(recorder.device)
    recorder.record("datasheet", sheet.name if sheet else None)
    for name in ("read_bandwidth", "copy_bandwidth"):
        _beside(recorder, name, getattr(measured, name), sheet.memory_bandwidth if sheet else None, "bytes/s")
    for dtype, rate in measured.matmul_flops.items():
        peak = sheet.matmul_flops.get(dtype) if sheet else None
        _beside(recorder, f"matmul_{str(dtype).removeprefix('torch.')}", rate, peak, "FLOP/s")


def _beside(recorder: Recorder, name: str, measured: float, peak: float | None, unit: str) -> None:
    share = measured / peak if peak else None
    recorder.record(name, {"measured": measured, "datasheet": peak, "share": share, "unit": unit})
