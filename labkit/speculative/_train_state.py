"""A head's training goes on where it was saved: weights, Adam's moments, losses, all in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import _check
from labkit.speculative.eagle_model import EagleModel
from labkit.training import TrainingState

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checked:
    """How the head stood after `step` steps: of each step of a draft, the share of places, in answers kept apart,
    where its likeliest token was the target's."""

    step: int
    matches: tuple[float, ...]


@dataclass
class HeadTraining:
    """How far a training has come: the loop's state, and each look at what was kept apart."""

    state: TrainingState = field(default_factory=TrainingState)
    checked: list[Checked] = field(default_factory=list)


def save(
    path: Path,
    model: EagleModel,
    optimizer: torch.optim.Optimizer,
    training: HeadTraining,
    identity: Mapping[str, object],
) -> None:
    """Write the whole training, in one move."""
    tensors = {"draft_ids": model.draft_ids}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        if parameter in optimizer.state:
            tensors |= {f"{name}/{moment}": optimizer.state[parameter][moment] for moment in _MOMENTS}
    record = {
        "identity": dict(identity),
        "losses": training.state.losses,
        "seconds": training.state.seconds,
        "checked": [(look.step, look.matches) for look in training.checked],
    }
    part = path.with_name(path.name + ".part")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, part, metadata={"head_training": json.dumps(record)})
    part.replace(path)


def resume(
    path: Path, model: EagleModel, optimizer: torch.optim.Optimizer, identity: Mapping[str, object]
) -> HeadTraining:
    """The training in `path`, put into `model` and `optimizer`; a new one where there is no such file.

    Errors: ValueError for a file that is none, or one of a training with other settings or data, naming what differs.
    """
    if not path.exists():
        return HeadTraining()
    takes = "a folder without a training, or one with this training"
    try:
        with safe_open(path, "pt") as file:
            record = json.loads((file.metadata() or {})["head_training"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"out: got {str(path)!r}, which cannot be read ({error}); takes {takes}") from error
    found = record["identity"]
    differs = [name for name in identity if found.get(name) != identity[name]]
    got = ", ".join(f"{name}={found.get(name)!r} and not {identity[name]!r}" for name in differs)
    _check.require(not differs, "out", f"{path}, of a training with {got}", takes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
            moments = {moment: tensors[f"{name}/{moment}"].to(parameter.device) for moment in _MOMENTS}
            # Fused Adam counts steps where the parameter lies, and for each parameter in a tensor of its own.
            step = torch.tensor(float(len(record["losses"])), device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
    checked = [Checked(step, tuple(matches)) for step, matches in record["checked"]]
    return HeadTraining(TrainingState(list(record["losses"]), record["seconds"]), checked)
