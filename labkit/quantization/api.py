"""`quantize_`: a model's matrices replaced by packed ones, layer by layer, in place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress as progress_bar
from labkit.kernels.bits import PACKED_BITS
from labkit.models import LoadedModel
from labkit.quantization import gptq, rtn
from labkit.quantization.calibration import (
    LayerInputs,
    LayerTask,
    Replacement,
    check_calibration,
    decoder_layers,
    watch_inputs,
)
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.linear import QuantEmbedding
from labkit.quantization.packing import weight_bytes
from labkit.quantization.primitives import group_length
from labkit.quantization.report import MatrixReport, QuantizationReport, output_error
from labkit.quantization.rtn import RTNConfig, round_to_nearest


class QuantizationInterrupted(RuntimeError):
    """Quantizing stopped in the middle. `converted` names the matrices that are quantized already; all others are as
    they were. The cause is chained."""

    def __init__(self, converted: Sequence[str], layers: Sequence[str], cause: BaseException) -> None:
        self.converted = tuple(converted)
        done = f"{layers[0]} to {layers[-1]} ({len(self.converted)} matrices)" if layers else "none"
        text = f"{type(cause).__name__}: {cause}. Quantized so far: {done}; everything else is unchanged"
        super().__init__(f"{text}. Load the model again to start over.")


@dataclass(frozen=True)
class _Plan:
    """What is to be quantized: for each decoder layer its matrices by full name; then those outside, such as a head."""

    layers: tuple[tuple[str, nn.Module, dict[str, nn.Linear]], ...]
    outside: dict[str, nn.Linear]

    @property
    def linears(self) -> dict[str, nn.Linear]:
        found: dict[str, nn.Linear] = {}
        for _, _, linears in self.layers:
            found |= linears
        return found | self.outside


def _left_alone(name: str, modules_to_not_convert: Sequence[str]) -> bool:
    """By full name, or by a dotted part of it, as in transformers: "lm_head", "mlp.down_proj", "model.layers.0"."""
    return any(f".{part}." in f".{name}." for part in modules_to_not_convert)


def plan(model: PreTrainedModel, modules_to_not_convert: Sequence[str]) -> _Plan:
    """Which matrices are to be quantized. Errors: ValueError where there are none, or some are quantized already."""
    done = [name for name, module in model.named_modules() if getattr(module, "is_quantized", False)]
    got = f"a model in which {len(done)} modules are quantized, {done[0]} first" if done else ""
    _check.require(not done, "model", got, "a model that is not quantized: load it again")
    list_name, layers = decoder_layers(model)
    wanted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not _left_alone(name, modules_to_not_convert)
    }
    per_layer = []
    for i, layer in enumerate(layers):
        prefix = f"{list_name}.{i}"
        per_layer.append((prefix, layer, {n: m for n, m in wanted.items() if n.startswith(f"{prefix}.")}))
    outside = {name: module for name, module in wanted.items() if not name.startswith(f"{list_name}.")}
    _check.require(bool(wanted), "modules_to_not_convert", list(modules_to_not_convert), "names that leave a matrix")
    return _Plan(tuple(per_layer), outside)


def check_weights(linears: Mapping[str, nn.Linear], config: object) -> None:
    """Refuse, before anything is touched, what the config cannot quantize: NaN, infinities, groups that do not fit."""
    for name, linear in linears.items():
        if hasattr(config, "group_size"):
            group_length(linear.in_features, config.group_size, name)
        got = f"NaN or an infinity in {name}.weight"
        _check.require(bool(linear.weight.isfinite().all()), "model", got, "finite weights")


# The room of each config: `quantize_layer(task) -> LayerResult`, and whether it needs calibration text.
_ROOMS = {RTNConfig: (rtn, False), GPTQConfig: (gptq, True)}


@torch.no_grad()
def quantize_(
    model: PreTrainedModel | LoadedModel,
    config: RTNConfig | GPTQConfig,
    calibration: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    modules_to_not_convert: Sequence[str] = ("lm_head",),
    bits_per_module: Mapping[str, int] | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Replace the matrices of a `transformers` causal LM (or a LoadedModel) by packed ones, in place.

    calibration: token ids `(n_samples, seq_len)`, as `token_batches` returns; RTN takes none, all others need it.
    modules_to_not_convert: names, or dotted parts of names, of matrices to leave alone. Embedding and norms always are
    (`quantize_embedding_` does the former); a head is quantized where this is empty. bits_per_module: another number
    of bits for some matrices, by full name. progress: a bar in a terminal, a line every ten seconds elsewhere.
    Goes layer by layer: beside the model it holds the calibration text's hidden states and one layer's work. Each layer
    sees the inputs that the layers before it, quantized already, give it.
    Errors: ValueError, before anything is touched, for what cannot be quantized; QuantizationInterrupted, which says
    which layers are done, for whatever goes wrong in the middle.
    """
    begin = time.perf_counter()
    model = model.model if isinstance(model, LoadedModel) else model
    _check.require(isinstance(model, PreTrainedModel), "model", type(model).__name__, "a transformers causal LM")
    known = " or ".join(kind.__name__ for kind in _ROOMS)
    _check.require(type(config) in _ROOMS, "config", type(config).__name__, f"{known}")
    _check.require(
        not isinstance(modules_to_not_convert, str), "modules_to_not_convert", modules_to_not_convert, "a list"
    )
    todo = plan(model, modules_to_not_convert)
    bits = check_bits(todo.linears, bits_per_module or {})
    check_weights(todo.linears, config)
    ids = None
    if _ROOMS[type(config)][1] or calibration is not None:
        ids = check_calibration(model, calibration)
    run = _Run(model, config, bits, ids)
    run.all(todo, progress)
    return QuantizationReport(config, tuple(run.reports), tuple(run.notes), time.perf_counter() - begin)


class _Run:
    """One call of `quantize_`, once its arguments are known to be right."""

    def __init__(
        self, model: PreTrainedModel, config: object, bits: Mapping[str, int], ids: torch.Tensor | None
    ) -> None:
        self.model, self.config, self.bits, self.ids = model, config, bits, ids
        self.reports: list[MatrixReport] = []
        self.notes: list[str] = []
        self._layers_done: list[str] = []

    def all(self, todo: _Plan, progress: bool) -> None:
        """Layer by layer, then what lies outside the layers."""
        training = self.model.training
        self.model.eval()
        label = f"{type(self.config).__name__.removesuffix('Config')}, {self.model.config.model_type}"
        bar = progress_bar(label, len(todo.layers), "layers") if progress else contextlib.nullcontext(lambda _: None)
        try:
            with bar as update:
                inputs = None if self.ids is None else LayerInputs(self.model, self.ids, todo.layers[0][1])
                for i, (name, layer, linears) in enumerate(todo.layers):
                    self._layer(name, layer, linears, inputs)
                    update(i + 1)
                if todo.outside:
                    self._outside(todo.outside)
        except BaseException as error:
            raise QuantizationInterrupted([m.name for m in self.reports], self._layers_done, error) from error
        finally:
            self.model.train(training)

    def _layer(self, name: str, layer: nn.Module, linears: dict[str, nn.Linear], inputs: LayerInputs | None) -> None:
        if linears:
            statistics = {} if inputs is None else inputs.statistics(layer, linears)
            self._convert(LayerTask(name, layer, linears, statistics, self.config, self.bits, self.notes))
        if inputs is not None:
            inputs.advance(layer)

    def _outside(self, linears: dict[str, nn.Linear]) -> None:
        """A head reads what the whole model makes: one more pass, where calibration is used at all."""
        statistics = {}
        if self.ids is not None:
            with watch_inputs(linears) as statistics:
                for sample in self.ids:
                    self.model(input_ids=sample[None].to(self.model.device), use_cache=False)
        for name, linear in linears.items():
            self._convert(LayerTask(name, None, {name: linear}, statistics, self.config, self.bits, self.notes))

    def _convert(self, task: LayerTask) -> None:
        """Run the algorithm on the task, then write all that it found."""
        result = _ROOMS[type(self.config)][0].quantize_layer(task)
        reports = [self._report(task, name, new) for name, new in result.replacements.items()]
        for parameter, value in result.folds:
            parameter.copy_(value)
        for name, new in result.replacements.items():
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, new.module)
        self.reports += reports
        self._layers_done.append(task.name)

    def _report(self, task: LayerTask, name: str, new: Replacement) -> MatrixReport:
        weight = task.linears[name].weight
        known = task.statistics.get(name)
        error = None if known is None else output_error(weight, new.approximation, known.gram)
        nbytes = weight_bytes(new.module) - (0 if new.module.bias is None else new.module.bias.nbytes)
        return MatrixReport(name, task.config_of(name).bits, nbytes, weight.numel(), error)


def check_bits(linears: Mapping[str, nn.Linear], bits_per_module: Mapping[str, int]) -> dict[str, int]:
    """Bits by the full name of a matrix that is to be quantized. Errors: ValueError for another name or width."""
    for name, bits in bits_per_module.items():
        _check.require(name in linears, "bits_per_module", name, _check.near(name, linears))
        _check.choice(f"bits_per_module[{name!r}]", bits, PACKED_BITS)
    return dict(bits_per_module)


@torch.no_grad()
def quantize_embedding_(model: PreTrainedModel | LoadedModel, config: RTNConfig) -> None:
    """Replace the table of the input embedding by a packed one, in place. A tied head keeps the float table.

    Errors: ValueError for a table that is packed already or not finite, and groups that do not divide its width.
    """
    model = model.model if isinstance(model, LoadedModel) else model
    table = model.get_input_embeddings()
    _check.require(isinstance(table, nn.Embedding), "model", f"an input {type(table).__name__}", "a float embedding")
    _check.require(
        bool(table.weight.isfinite().all()), "model", "NaN or an infinity in the embedding", "finite weights"
    )
    packed = round_to_nearest(table.weight, config)
    model.set_input_embeddings(QuantEmbedding(packed, table.weight.dtype))
