"""Small experiments of chapter 02: one block by every method, columns kept in float, and the parts left alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit.models import shared_copy
from labkit.quality import perplexity
from labkit.quantization import awq, gptq, rtn
from labkit.quantization.api import quantize_, quantize_embedding_
from labkit.quantization.awq import AWQConfig
from labkit.quantization.calibration import (
    InputStatistics,
    LayerInputs,
    LayerTask,
    check_calibration,
    decoder_layers,
)
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.linear import QuantLinear
from labkit.quantization.packing import weight_bytes
from labkit.quantization.plan import plan
from labkit.quantization.report import output_error
from labkit.quantization.rtn import RTNConfig, round_to_nearest


@torch.no_grad()
def layer_task(model: PreTrainedModel, calibration: torch.Tensor, layer: int, config: object) -> LayerTask:
    """One decoder layer with what flows into its matrices in the float model on `calibration (n_samples, seq_len)`."""
    layers = plan(model, ("lm_head",)).layers
    _check.integer("layer", layer, 0, len(layers) - 1)
    inputs = LayerInputs(model, check_calibration(model, calibration), layers[0][1])
    for _, module, _ in layers[:layer]:
        inputs.advance(module)
    name, module, linears = layers[layer]
    return LayerTask(name, module, linears, inputs.statistics(module, linears), config)


@dataclass(frozen=True)
class BlockRow:
    """One matrix's output error, as a part of its output's mean square, by method."""

    name: str
    rtn: float
    awq: float
    gptq: float


@torch.no_grad()
def one_block(
    model: PreTrainedModel, calibration: torch.Tensor, *, layer: int, bits: int, group_size: int = 64
) -> list[BlockRow]:
    """Every matrix of one layer by three methods on the same inputs; the model is left as it was."""
    task = layer_task(model, calibration, layer, None)
    configs = {
        rtn: RTNConfig(bits, group_size),
        awq: AWQConfig(bits, group_size),
        gptq: GPTQConfig(bits, group_size),
    }
    errors: dict[str, list[float]] = {name: [] for name in task.linears}
    for room, config in configs.items():
        asked = LayerTask(task.name, task.module, task.linears, task.statistics, config)
        for name, new in room.quantize_layer(asked).replacements.items():
            gram = task.statistics[name].gram
            errors[name].append(output_error(task.linears[name].weight, new.approximation, gram))
    return [BlockRow(name.rpartition(".")[2], *values) for name, values in errors.items()]


@torch.no_grad()
def keep_columns(
    weight: torch.Tensor, statistics: InputStatistics, config: RTNConfig, share: float
) -> dict[str, float]:
    """Output error of `weight (out_features, in_features)` rounded, with a share of its columns kept in float: those
    with the largest inputs, those with the largest weights, and as many at random (AWQ, section 3.1, table 1)."""
    _check.number("share", share, 0.0, 1.0)
    rounded = round_to_nearest(weight, config).dequantize()
    kept = max(1, round(share * weight.shape[1]))
    scores = {
        "largest inputs": statistics.mean_abs,
        "largest weights": weight.abs().mean(0).float(),
        "at random": torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device),
    }
    errors = {"none kept": output_error(weight, rounded, statistics.gram)}
    for name, score in scores.items():
        mixed = rounded.clone()
        columns = score.topk(kept).indices
        mixed[:, columns] = weight[:, columns].float()
        errors[name] = output_error(weight, mixed, statistics.gram)
    return errors


@torch.no_grad()
def ratio_curves(task: LayerTask, config: AWQConfig) -> tuple[list[float], dict[str, list[float]]]:
    """AWQ's search laid open: the ratios that it tries, and the output error at each, a curve for each input of the
    layer, named by the matrices that read it. `task` is what `layer_task` returns."""
    curves = {}
    for link, names in awq.scaled_together(task):
        weights = [task.linears[name].weight.float() for name in names]
        found = awq.scale_errors(weights, [config] * len(names), task.statistics[names[0]], link)
        label = ", ".join(name.rpartition(".")[2].removesuffix("_proj") for name in names)
        curves[label] = [error / len(names) for _, error in found]
    return [i / config.n_grid for i in range(config.n_grid)], curves


def act_order_layout(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A copy in which the columns of each packed group are scattered over the row, as act-order leaves them. The codes
    stay where they are, so that it computes something else: for timing what the layout costs, and nothing more."""
    copied, generator = shared_copy(model), torch.Generator().manual_seed(seed)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            weight = module.portable()
            order = torch.randperm(weight.in_features, generator=generator).to(weight.device)
            scattered = replace(weight, g_idx=(order // weight.group_size).to(torch.int32))
            copied.set_submodule(name, QuantLinear(scattered, module.bias, dtype=model.dtype))
    return copied


@dataclass(frozen=True)
class PartResult:
    """A part of the model quantized alone: perplexity over the float model's, and the bytes saved of a model whose
    float weights are 16 bits wide; below 0 where a packed copy comes beside a table that another part still reads."""

    name: str
    ratio: float
    saved: int


def _round_norms_(model: PreTrainedModel, config: RTNConfig) -> None:
    """Round every norm's gain to the grid. They stay float tensors: there are too few of them to be worth packing."""
    for module in model.modules():
        gain = getattr(module, "weight", None)
        if type(module).__name__.endswith("Norm") and isinstance(gain, torch.Tensor):
            gain.data = round_to_nearest(gain[None], config).dequantize(gain.dtype)[0]


def _changed(model: PreTrainedModel, part: str, config: RTNConfig) -> PreTrainedModel:
    """A copy with one part rounded."""
    copied = shared_copy(model)
    if part == "norms":
        _round_norms_(copied, config)
    elif part == "head":
        layers, _ = decoder_layers(copied)
        quantize_(copied, config, modules_to_not_convert=(layers,), progress=False)
    else:
        quantize_embedding_(copied, config)
    return copied


def _bytes_in_16_bits(model: PreTrainedModel) -> int:
    """Of all weights, were the float ones 16 bits wide; packed ones as they are."""
    return weight_bytes(model) - sum(p.nbytes - 2 * p.numel() for p in set(model.parameters()))


@torch.no_grad()
def parts(model: PreTrainedModel, token_ids: torch.Tensor, context_length: int) -> Iterator[PartResult]:
    """What a model loses when parts that quantizers leave alone are rounded to nearest, each alone, at 8 and at 4 bits:
    the head, the input embedding (with the head, where one table serves both), and the norms' gains, these as numbers
    and not as bytes. Groups of 64.

    Measured as perplexity on `token_ids`; `model` is left as it was.
    """
    base, whole = perplexity(model, token_ids, context_length), _bytes_in_16_bits(model)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for bits in (8, 4):
        for part in ("head", "embedding and head" if tied else "embedding", "norms"):
            changed = _changed(model, part, RTNConfig(bits, 64))
            ratio = perplexity(changed, token_ids, context_length) / base
            yield PartResult(f"{part}, {bits} bits", ratio, whole - _bytes_in_16_bits(changed))
