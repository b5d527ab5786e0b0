"""A model saved by transformers 5, as transformers 4.51 of `requirements-legacy.txt` reads it."""

import json
from pathlib import Path

from job import Job


def old_config(job: Job) -> dict[str, object]:
    """config.json in the words of transformers 4: it reads over `rope_parameters` in silence and takes a base of 10000.

    Errors: ValueError for a rotary embedding other than the plain one, whose old words are others.
    """
    config = json.loads((job.model / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(f"a rotary embedding of type {rope['rope_type']}; this runner rewrites the plain one alone")
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config.pop("dtype", "float32")
    config.pop("transformers_version", None)
    return config


def rewrite_model(job: Job) -> Path:
    """A folder beside `model/` with its weights and the old config."""
    folder = job.folder / "model_4"
    folder.mkdir()
    for weights in job.model.glob("model*.safetensors*"):
        (folder / weights.name).symlink_to(weights)
    (folder / "config.json").write_text(json.dumps(old_config(job)), encoding="utf-8")
    return folder
