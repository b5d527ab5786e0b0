"""A head's training goes on where it was saved: weights, Adam's moments, losses, all in one safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from labkit.speculative.eagle_model import EagleModel
from labkit.training import TrainingState
from labkit.training_file import put_back, read_training, with_moments, write_training

_KIND = "head_training"


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
        tensors |= with_moments(name, parameter, optimizer)
    record = {
        "identity": dict(identity),
        "losses": training.state.losses,
        "seconds": training.state.seconds,
        "checked": [(look.step, look.matches) for look in training.checked],
    }
    write_training(path, _KIND, tensors, record)


def resume(
    path: Path, model: EagleModel, optimizer: torch.optim.Optimizer, identity: Mapping[str, object]
) -> HeadTraining:
    """The training in `path`, put into `model` and `optimizer`; a new one where there is no such file.

    Errors: ValueError for a file that is none, or one of a training with other settings or data, naming what differs.
    """
    if not path.exists():
        return HeadTraining()
    takes = "a folder without a training, or one with this training"
    tensors, record = read_training(path, _KIND, identity, argument="out", takes=takes)
    for name, parameter in model.named_parameters():
        put_back(name, parameter, optimizer, tensors, len(record["losses"]))
    checked = [Checked(step, tuple(matches)) for step, matches in record["checked"]]
    return HeadTraining(TrainingState(list(record["losses"]), record["seconds"]), checked)
