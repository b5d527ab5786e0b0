"""A training that was interrupted goes on where it was saved: all of it in one safetensors file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from labkit import _check
from labkit.kernels.types import PackedWeight
from labkit.quantization._qat_layers import FakeQuantLinear
from labkit.training import TrainingState
from labkit.training_file import put_back, read_training, with_moments, write_training

_KIND = "qat"
_TRAINED = ("latent", "relative")


@dataclass(frozen=True)
class Saved:
    """What a state file holds: tensors by name, and a record as plain JSON."""

    tensors: dict[str, torch.Tensor]
    record: dict[str, object]

    @property
    def state(self) -> TrainingState:
        return TrainingState(list(self.record["losses"]), self.record["seconds"])

    def start(self, name: str) -> PackedWeight:
        """The packed weight that matrix `name` began with."""
        found = {field: self.tensors.get(f"{name}/start/{field}") for field in ("qweight", "scales", "zeros", "g_idx")}
        return PackedWeight(**found, **self.record["formats"][name])

    def restore(self, fake_quant: Mapping[str, FakeQuantLinear], optimizer: torch.optim.Optimizer) -> None:
        """Put parameters and the optimizer's moments back."""
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in _trained(fake_quant):
            if id(parameter) not in known:
                continue
            put_back(name, parameter, optimizer, self.tensors, len(self.record["losses"]))


def _trained(fake_quant: Mapping[str, FakeQuantLinear]) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}/{kind}", getattr(layer, kind)) for name, layer in fake_quant.items() for kind in _TRAINED]


def fingerprint(linears: Mapping[str, nn.Linear], ids: torch.Tensor) -> str:
    """Tells a model and its calibration text from others: a digest of a row of each matrix, and of all tokens."""
    digest = hashlib.sha256(ids.numpy(force=True).tobytes())
    for name, linear in linears.items():
        digest.update(name.encode())
        digest.update(str(tuple(linear.weight.shape)).encode())
        digest.update(linear.weight[0].detach().float().numpy(force=True).tobytes())
    return digest.hexdigest()


def save(
    path: Path,
    fake_quant: Mapping[str, FakeQuantLinear],
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
    identity: Mapping[str, object],
) -> None:
    """Write the state to a file beside `path`, then rename it: `path` always holds a whole state."""
    tensors, formats = {}, {}
    for name, layer in fake_quant.items():
        start = layer.start
        formats[name] = {"bits": start.bits, "group_size": start.group_size, "in_features": start.in_features}
        tensors |= {f"{name}/start/{field}": tensor for field, tensor in start.tensors.items()}
    for name, parameter in _trained(fake_quant):
        if parameter in optimizer.state:
            tensors |= with_moments(name, parameter, optimizer)
    record = {"identity": identity, "formats": formats, "losses": state.losses, "seconds": state.seconds}
    write_training(path, _KIND, tensors, record)


def load(path: Path | None, identity: Mapping[str, object]) -> Saved | None:
    """The state at `path`, None where there is no such file.

    Errors: ValueError for a file that is none, for one of another model, text or config, naming what differs, and for
    a folder that is not there, which else the first save would find.
    """
    if path is None:
        return None
    _check.require(path.parent.is_dir(), "state_path", str(path), "a path in a folder that exists")
    if not path.exists():
        return None
    takes = "a file that does not exist yet, or one that this training wrote"
    return Saved(*read_training(path, _KIND, identity, argument="state_path", takes=takes))
