"""A training that was interrupted goes on where it was saved: all of it in one safetensors file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from labkit import _check
from labkit.kernels.types import PackedWeight
from labkit.quantization._qat_layers import FakeQuantLinear
from labkit.training import TrainingState

_MOMENTS = ("exp_avg", "exp_avg_sq")
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
            with torch.no_grad():
                parameter.copy_(self.tensors[name])
            moments = {moment: self.tensors[f"{name}/{moment}"].to(parameter.device) for moment in _MOMENTS}
            # Fused Adam counts steps where the parameter lies.
            step = torch.tensor(float(len(self.record["losses"])), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}


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
            tensors[name] = parameter.detach()
            tensors |= {f"{name}/{moment}": optimizer.state[parameter][moment] for moment in _MOMENTS}
    record = {"identity": identity, "formats": formats, "losses": state.losses, "seconds": state.seconds}
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata={"qat": json.dumps(record)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {}).get("qat", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()} if record else {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"state_path: got {str(path)!r}, which cannot be read ({error}); takes {takes}") from error
    _check.require(record is not None, "state_path", f"{path}, which holds no training", takes)
    found = record["identity"]
    differs = [name for name in identity if found.get(name) != identity[name]]
    got = ", ".join(f"{name}={found.get(name)!r} and not {identity[name]!r}" for name in differs)
    _check.require(not differs, "state_path", f"{path}, of a training with {got}", takes)
    return Saved(tensors, record)
