"""Models with random weights: a tiny Llama for tests, and any catalogue model's shape for speed and memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit._progress import progress
from labkit.model_files import catalogue
from labkit.model_files.convert import ONE_AT_A_TIME
from labkit.model_files.fits import refuse_unless_it_fits
from labkit.sizing import parameter_count

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel

_SEED = 0
# Small, but nothing in it is trivial: grouped KV heads, several layers, and weights large enough that attention is far
# from uniform, so that a wrong mask or a wrong cache shows.
_TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_SIZES = (
    *("num_attention_heads", "num_key_value_heads", "hidden_size"),
    *("intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"),
)


@contextlib.contextmanager
def _naming(config_overrides: dict[str, object]) -> Iterator[None]:
    """The library checks each field in its own way, some only as the model is built: one kind of error for all."""
    try:
        yield
    except Exception as error:
        takes = f"what a LlamaConfig takes: {type(error).__name__}: {error}"
        raise ValueError(f"config_overrides: got {config_overrides}; takes {takes}") from error


def tiny_model(**config_overrides: object) -> LlamaForCausalLM:
    """A Llama of two layers and 64 hidden units with seeded random weights, float32 on the CPU, in evaluation mode.

    config_overrides: fields of `transformers.LlamaConfig` (and `attn_implementation`). By default 4 heads share 2 KV
    heads of 16, the vocabulary has 256 ids, and no id ends a text. The global random state is left as it was.
    Errors: ValueError for a field that a LlamaConfig does not have, and for heads that do not divide.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    known = [*LlamaConfig().to_dict(), "attn_implementation"]
    for field in config_overrides:
        _check.choice("config_overrides", field, known)
    fields = _TINY | config_overrides
    heads, kv_heads, hidden, *_ = (_check.integer(field, fields[field], 1) for field in _SIZES)
    _check.require(hidden % heads == 0, "hidden_size", hidden, f"a multiple of num_attention_heads={heads}")
    _check.require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
    if fields.get("head_dim") is not None:
        head_dim = _check.integer("head_dim", fields["head_dim"], 2)
        _check.require(head_dim % 2 == 0, "head_dim", head_dim, "an even number: rotary embedding turns pairs")
    with _naming(config_overrides):
        config = LlamaConfig(**fields)
    refuse_unless_it_fits("tiny_model", 4 * parameter_count(config), torch.float32, torch.device("cpu"))
    with ONE_AT_A_TIME, _naming(config_overrides), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)


def shaped_model(
    name: str, dtype: torch.dtype | str | None = None, device: torch.device | str | None = None
) -> PreTrainedModel:
    """A catalogue model's shape with seeded random weights: it runs as fast and takes as much memory as the real one.

    Weights are made on `device` in `dtype`, one at a time, with no copy elsewhere. dtype and device: None as in
    `load_model`. No id ends a text, so that `generate` makes as many tokens as it is asked for.
    Errors: ValueError for an unknown name, and for a shape that does not fit into free memory, with the numbers.
    """
    info = catalogue.find(name)
    device = _check.device("device", device)
    dtype = default_dtype(device) if dtype is None else _check.dtype("dtype", dtype)
    size = info.parameters * dtype.itemsize
    refuse_unless_it_fits(name, size, dtype, device)
    model = _empty(info, dtype, device)
    generator = torch.Generator(device).manual_seed(_SEED)
    done = 0
    with torch.no_grad(), progress(f"{name}: random weights", size) as update:
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, model.config.initializer_range, generator=generator)
            else:  # a norm's gain, or a bias
                parameter.fill_(1.0 if key.endswith("weight") else 0.0)
            done += parameter.nbytes
            update(done)
    return model.eval().requires_grad_(False)


def _empty(info: catalogue.ModelInfo, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The modules on the device, parameters allocated and not written; buffers as the model computes them."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with ONE_AT_A_TIME, device, no_init_weights():
        model = AutoModelForCausalLM.from_config(info.config(), dtype=dtype)
    model.tie_weights()
    return model


def default_dtype(device: torch.device) -> torch.dtype:
    """float32 on a CPU, where it is the fastest with no kernel of ours, and bfloat16 on a GPU."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16
