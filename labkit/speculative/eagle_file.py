"""A head on disk: one safetensors file, its shape in the file's metadata."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from labkit import _check
from labkit._paths import DATA
from labkit.speculative.eagle_model import EagleConfig, EagleModel

SHIPPED = DATA / "drafters" / "smollm2-135m-eagle.safetensors"
_FORMAT = "labkit-eagle-1"


def save_model_file(model: EagleModel, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head, its weights in `dtype`, in one move: no reader finds half a file."""
    tensors = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    metadata = {"format": _FORMAT, "config": json.dumps(asdict(model.config))}
    save_file({name: t.contiguous() for name, t in tensors.items()}, part, metadata=metadata)
    part.replace(path)


def load_model_file(path: str | Path) -> EagleModel:
    """The head in a file that `save_model_file` wrote, in float32. Errors: ValueError for another file."""
    takes = "a head's safetensors file, as labkit.speculative.train writes it"
    path = Path(path)
    _check.require(path.is_file(), "path", str(path), takes)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check.require(metadata.get("format") == _FORMAT, "path", str(path), takes)
            config = EagleConfig(**json.loads(metadata["config"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        model = EagleModel(config, tensors["draft_ids"])
        model.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in tensors.items()})
        low, high = map(int, model.draft_ids.aminmax())
    except (SafetensorError, KeyError, TypeError, RuntimeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"path: got {path}, which cannot be read ({error}); takes {takes}") from error
    within = 0 <= low and high < config.vocab_size
    _check.require(within, "path", f"{path}, which drafts the ids {low} to {high}", f"ids below {config.vocab_size}")
    return model.eval().requires_grad_(False)
