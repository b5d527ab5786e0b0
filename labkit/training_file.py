"""A training on disk: weights, Adam's moments and a record in one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from labkit import _check

_MOMENTS = ("exp_avg", "exp_avg_sq")


def with_moments(name: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """A parameter as it goes into the file, with the moments that the optimizer has of it, if any."""
    tensors = {name: parameter.detach()}
    if parameter in optimizer.state:
        tensors |= {f"{name}/{moment}": optimizer.state[parameter][moment] for moment in _MOMENTS}
    return tensors


def put_back(
    name: str, parameter: Tensor, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], steps: int
) -> None:
    """What `with_moments` took, after `steps` steps."""
    with torch.no_grad():
        parameter.copy_(tensors[name])
    moments = {moment: tensors[f"{name}/{moment}"].to(parameter.device) for moment in _MOMENTS}
    # Fused Adam counts steps where the parameter lies, and for each parameter in a tensor of its own.
    optimizer.state[parameter] = {"step": torch.tensor(float(steps), device=parameter.device), **moments}


def write_training(path: Path, kind: str, tensors: Mapping[str, Tensor], record: Mapping[str, object]) -> None:
    """Write a training of a `kind` to a file beside `path`, then rename it: `path` always holds a whole one.

    record: JSON, with "identity": what makes it this training and no other.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, partial, metadata={kind: json.dumps(record)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_training(
    path: Path, kind: str, identity: Mapping[str, object], *, argument: str, takes: str
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and record of the training at `path`.

    Errors: ValueError, in the name of `argument`, for a file that is none, for another kind, and for one of another
    identity, naming what differs.
    """
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {}).get(kind, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()} if record else {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{argument}: got {str(path)!r}, which cannot be read ({error}); takes {takes}") from error
    _check.require(record is not None, argument, f"{path}, which holds no training", takes)
    found = record["identity"]
    differs = [name for name in identity if found.get(name) != identity[name]]
    got = ", ".join(f"{name}={found.get(name)!r} and not {identity[name]!r}" for name in differs)
    _check.require(not differs, argument, f"{path}, of a training with {got}", takes)
    return tensors, record
