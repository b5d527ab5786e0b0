"""A quantized model written as a checkpoint that other software loads: GPTQ, AWQ or compressed-tensors."""

from __future__ import annotations

import copy
import itertools
import json
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from labkit import _check
from labkit.kernels.types import PackedWeight
from labkit.models import LoadedModel, plain_model
from labkit.quantization import layouts
from labkit.quantization.calibration import decoder_layers
from labkit.quantization.layout_config import FORMATS, Matrices, quantization_config
from labkit.quantization.linear import QuantLinear

MAX_SHARD_BYTES = 2_000_000_000
# Of modules that no weight-only layout can hold.
_REASONS = {
    "Int8Linear": "a layer that rounds its inputs too, which these layouts do not say; RTN, GPTQ, AWQ or QAT",
    "FP8Linear": "a layer of FP8 weights and inputs, and these layouts hold integers; RTN, GPTQ, AWQ or QAT",
    "QuantEmbedding": "a packed embedding, which these layouts do not hold: save before quantize_embedding_, or load "
    "and quantize the model again without it",
}


@torch.no_grad()
def save_quantized(
    model: PreTrainedModel | LoadedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    format: str = "compressed-tensors",
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a model that `quantize_` has packed to a new folder, which other software loads; returns the folder.

    tokenizer: None for the LoadedModel's own; of a bare model none is written then. format: "compressed-tensors" (2, 3,
    4 or 8 bits, mixed or not; transformers and vLLM), "gptq" (one width, act-order) or "awq" (4 bits). path: a folder
    that does not exist yet, or an empty one. Safetensors files have at most `max_shard_bytes` bytes of tensors each,
    one tensor at least.
    What stays in float is written in float16 for GPTQ and AWQ, whose kernels multiply in it and whose readers make
    every scale a float16; for compressed-tensors in the model's own 16-bit dtype, bfloat16 for a float32 model, as that
    is what scales are in. All is written to a folder beside `path` that takes its name at the end: whatever goes wrong
    before, `path` stays as it was (a process that is killed leaves that folder, `.name.` and eight digits).
    transformers unpacks compressed-tensors at the first call of the model itself; what calls its parts first, as
    `labkit.quality.perplexity` does, wants `quantization_config=CompressedTensorsConfig(dequantize=True)` at loading.
    Errors: ValueError, before anything is written, for what the layout cannot hold, naming the matrix and what can.
    """
    loaded, model = model, plain_model(model)
    tokenizer = loaded.tokenizer if tokenizer is None and isinstance(loaded, LoadedModel) else tokenizer
    _check.choice("format", format, FORMATS)
    _check.integer("max_shard_bytes", max_shard_bytes, 1)
    _check.require(isinstance(model, PreTrainedModel), "model", type(model).__name__, "a transformers model")
    ok = tokenizer is None or isinstance(tokenizer, PreTrainedTokenizerBase)
    _check.require(ok, "tokenizer", type(tokenizer).__name__, "a tokenizer of transformers, or None")
    target = _new_folder(path)
    _check_modules(model)
    dtype = _float_dtype(model, format)
    stored = quantization_config(_matrices(model), format)
    _check_values(model, dtype)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    part.mkdir(parents=True)
    try:
        tensors = itertools.chain(_floats(model, dtype), _packed(model, stored, dtype))
        _write_shards(part, tensors, max_shard_bytes)
        _write_config(model, stored, dtype, part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        if target.exists():
            target.rmdir()
        part.rename(target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return target


def _new_folder(path: str | Path) -> Path:
    """`path`, absolute. Errors: ValueError for a file and for a folder that holds anything."""
    _check.require(isinstance(path, str | Path), "path", type(path).__name__, "a folder's name")
    target = Path(path).expanduser().resolve()
    empty = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    takes = "a folder that does not exist yet, or an empty one; nothing is overwritten"
    _check.require(empty, "path", str(path), takes)
    return target


def _check_modules(model: PreTrainedModel) -> None:
    """Refuse a model without packed matrices, and one with others than those."""
    quantized = {name: module for name, module in model.named_modules() if getattr(module, "is_quantized", False)}
    for name, module in quantized.items():
        kind = type(module).__name__
        why = _REASONS.get(kind, "a layer that these layouts do not hold")
        _check.require(isinstance(module, QuantLinear), "model", f"{name}, a {kind}", f"no such layer: it is {why}")
    takes = "a model with QuantLinear layers: quantize_(model, RTNConfig()) makes them"
    _check.require(bool(quantized), "model", f"a {type(model).__name__} without packed matrices", takes)


def _float_dtype(model: PreTrainedModel, format: str) -> torch.dtype:
    """What is written in the place of float parameters, and the dtype of scales."""
    if format != "compressed-tensors":
        return torch.float16
    return torch.float16 if model.get_input_embeddings().weight.dtype is torch.float16 else torch.bfloat16


def _matrices(model: PreTrainedModel) -> Matrices:
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    packed = {name: module.portable() for name, module in modules.items() if isinstance(module, QuantLinear)}
    floats = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    head_name = next((name for name, module in modules.items() if module is head), None)
    return Matrices(packed, floats, head_name, f"{decoder_layers(model)[0]}.")


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's matrix is the embedding's, and not only said to be: a packed head is another one."""
    head = model.get_output_embeddings()
    return isinstance(head, nn.Linear) and head.weight is model.get_input_embeddings().weight


def _check_values(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Refuse, before anything is written, float weights and scales that `dtype` cannot hold."""
    for _ in _floats(model, dtype):
        pass
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            layouts.stored_scales(name, module.portable(), dtype)


def _floats(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of what stays in float, on the CPU, biases of packed matrices too; a tied head is left out, as
    transformers does."""
    tied = model.get_output_embeddings() if _is_tied(model) else None
    for prefix, module in model.named_modules():
        own = dict(module._parameters)
        if not isinstance(module, QuantLinear):
            own |= {n: buffer for n, buffer in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in own.items():
            if tensor is not None and not (module is tied and name == "weight"):
                full = f"{prefix}.{name}".lstrip(".")
                yield full, _cast(full, tensor.detach(), dtype)


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy on the CPU, in `dtype` where it is in float. Errors: ValueError for a value that becomes infinite."""
    if not tensor.is_floating_point():
        return tensor.cpu().clone()
    # A copy in any case: safetensors refuses tensors that share memory.
    found = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
    got = f"{name} with values up to {tensor.abs().max():.3g}" if tensor.numel() else name
    takes = f"float weights that {str(dtype).removeprefix('torch.')} holds"
    _check.require(bool(found.isfinite().all()), "model", got, takes)
    return found


def _packed(
    model: PreTrainedModel, stored: dict[str, object], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the packed matrices in the layout that `stored` names, one matrix at a time, on the CPU."""
    for prefix, module in model.named_modules():
        if isinstance(module, QuantLinear):
            weight = module.portable().map(torch.Tensor.cpu)
            scales = layouts.stored_scales(prefix, weight, dtype)
            for name, tensor in _laid_out(weight, scales, stored).items():
                yield f"{prefix}.{name}", tensor.contiguous()


def _laid_out(weight: PackedWeight, scales: torch.Tensor, stored: dict[str, object]) -> dict[str, torch.Tensor]:
    if stored["quant_method"] == "gptq":
        return layouts.to_gptq(weight, scales, v1=stored["checkpoint_format"] == "gptq")
    if stored["quant_method"] == "awq":
        return layouts.to_awq(weight, scales)
    return layouts.to_compressed_tensors(weight, scales)


def _write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_bytes: int) -> None:
    """One file where all fits, or numbered files and an index; holds one shard in memory at a time."""
    shards: list[list[str]] = []
    waiting: dict[str, torch.Tensor] = {}
    total = size = 0

    def flush() -> None:
        save_file(waiting, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        waiting[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    where = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_config(model: PreTrainedModel, stored: dict[str, object], dtype: torch.dtype, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.tie_word_embeddings = _is_tied(model)
    config.quantization_config = stored
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
