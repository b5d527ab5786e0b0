"""Will a model fit? Estimated from headers or shape, and refused with the numbers, before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from labkit import _check
from labkit.hardware import describe
from labkit.model_files.catalogue import catalogue

# What loading needs beside the weights themselves.
_HEADROOM = 1.05
_FLOATING = ("F64", "F32", "F16", "BF16")
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2}


def stored_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a model folder's weights once loaded, read from the headers: floating ones in `dtype`, others as stored.

    Errors: ValueError if it is not a folder with config.json and *.safetensors.
    """
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    takes = "a folder with config.json and *.safetensors (pickled weights are not loaded)"
    _check.require(bool(files) and (folder / "config.json").is_file(), "name", str(folder), takes)
    total = 0
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                slices = [file.get_slice(key) for key in file.keys()]
        except SafetensorError as error:
            raise ValueError(
                f"name: got {str(folder)!r}, whose {path.name} is damaged ({error}); takes {takes}"
            ) from error
        for entry in slices:
            stored = entry.get_dtype()
            width = dtype.itemsize if stored in _FLOATING else _BYTES.get(stored, 1)
            total += torch.Size(entry.get_shape()).numel() * width
    return total


def refuse_unless_it_fits(name: str, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `size` bytes of weights in `dtype` fit into the free memory of `device`."""
    free = describe(device).free_bytes
    if size * _HEADROOM <= free:
        return
    got = f"{name!r}, which takes {size / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}"
    raise ValueError(
        f"name: got {got}; takes what fits in the {free / 1e9:.1f} GB free on {device}: {_advice(size, dtype, free)}"
    )


def _advice(size: int, dtype: torch.dtype, free: int) -> str:
    """A setting that fits: the same model in half the bytes, else the largest of the catalogue."""
    narrow = torch.bfloat16.itemsize
    if size * narrow / dtype.itemsize * _HEADROOM <= free:
        return f"the same model in dtype='bfloat16' takes {size * narrow / dtype.itemsize / 1e9:.1f} GB"
    free_to_all = [info for info in catalogue().values() if not info.gated]
    fitting = [info for info in free_to_all if info.parameters * narrow * _HEADROOM <= free]
    if not fitting:
        return "nothing in the catalogue does, so free some memory first"
    largest = max(fitting, key=lambda info: info.parameters)
    return f"{largest.name!r} in dtype='bfloat16' takes {largest.parameters * narrow / 1e9:.1f} GB"
