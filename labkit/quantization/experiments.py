"""Small experiments of chapter 02: one block by every method, columns kept in float, and the parts left alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit.models import shared_copy
from labkit.quality import perplexity
from labkit.quantization import awq, gptq, rtn
from labkit.quantization.api import quantize_, quantize_embedding_
from labkit.quantization.awq import AWQConfig
from labkit.quantization.calibration import InputStatistics, LayerInputs, LayerTask, check_calibration
from labkit.quantization.gptq import GPTQConfig
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


@dataclass(frozen=True)
class PartResult:
    """A part of the model quantized alone: perplexity over the float model's, and the bytes of 16-bit weights saved."""

    name: str
    ratio: float
    saved: int


def _round_norms_(model: PreTrainedModel, config: RTNConfig) -> int:
    """Round every norm's gain to the grid, kept in float: there are too few of them to be worth packing."""
    saved = 0
    for parameter in model.parameters():
        if parameter.ndim == 1:
            packed = round_to_nearest(parameter[None], config)
            parameter.data = packed.dequantize(parameter.dtype)[0]
            saved += 2 * parameter.numel() - packed.nbytes
    return saved


@torch.no_grad()
def parts(model: PreTrainedModel, token_ids: torch.Tensor, context_length: int) -> Iterator[PartResult]:
    """What a model loses when the parts that quantizers leave alone are rounded to nearest, each alone, at 8 and at 4
    bits with groups of 64: the head, the input embedding, the norms' gains (those only as numbers, not as bytes).

    Measured as perplexity on `token_ids`; `model` is left as it was.
    """
    base = perplexity(model, token_ids, context_length)
    for bits in (8, 4):
        config = RTNConfig(bits, 64)
        for name in ("head", "embedding", "norms"):
            changed = shared_copy(model)
            table = model.get_input_embeddings().weight
            saved = 2 * table.numel() - round(table.numel() * (bits + 24 / 64) / 8)
            if name == "head":
                quantize_(changed, config, modules_to_not_convert=("layers",), progress=False)
            elif name == "embedding":
                quantize_embedding_(changed, config)
            else:
                saved = _round_norms_(changed, config)
            yield PartResult(f"{name}, {bits} bits", perplexity(changed, token_ids, context_length) / base, saved)
