"""What every op's choice of backend is made of."""

import importlib.util
import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Choice:
    """A backend's name and the reason why it is the one."""

    name: str
    reason: str


class BackendUnavailable(RuntimeError):
    """A backend asked for by name cannot run here; the message says why."""


_LEAST_CAPABILITY = (8, 0)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, as TRITON_INTERPRET=1 makes it if set before the first one."""
    if not _has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def interpret_without_gpu() -> bool:
    """Where there is no GPU, have Triton run kernels in its interpreter from now on; returns whether it does.

    To be called before the first kernel, since Triton reads the switch as it is imported. Errors: RuntimeError where it
    was imported without: a notebook's kernel has to be restarted.
    """
    if torch.cuda.is_available() or not _has_triton():
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    # The standard library's functions show what it was imported with.
    if isinstance(triton.language.zeros, triton.JITFunction):
        raise RuntimeError("Triton was imported before: restart, and call interpret_without_gpu() first")
    return True


def why_no_triton(device: torch.device) -> str | None:
    """Why a Triton kernel cannot run on tensors of this device, or None."""
    if not _has_triton():
        return "Triton is not installed"
    if device.type == "cuda":
        if interpreted():
            return "Triton's interpreter is switched on (TRITON_INTERPRET=1), which is for CPUs"
        capability = _capability(device)
        if capability >= _LEAST_CAPABILITY:
            return None
        return f"it needs compute capability 8.0; this GPU has {capability[0]}.{capability[1]}"
    if device.type == "cpu":
        needs = "on a CPU it needs Triton's interpreter: interpret_without_gpu() before the first kernel"
        return None if interpreted() else needs
    return f"it runs on CUDA GPUs; the tensors are on {device}"
