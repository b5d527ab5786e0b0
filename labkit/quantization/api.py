"""`quantize_`: a model's matrices replaced by packed ones, layer by layer, in place."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress as progress_bar
from labkit.models import LoadedModel, plain_model
from labkit.quantization import awq, fp8, gptq, qat, rtn, smoothquant
from labkit.quantization._memory import give_back_freed_memory
from labkit.quantization.awq import AWQConfig
from labkit.quantization.calibration import (
    LayerInputs,
    LayerResult,
    LayerTask,
    Replacement,
    check_calibration,
    watch_inputs,
)
from labkit.quantization.fp8 import FP8Config
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.linear import QuantEmbedding, QuantLinear
from labkit.quantization.plan import Plan, check_bits, check_weights, plan
from labkit.quantization.qat import QATConfig, QATReport, QATRun
from labkit.quantization.report import MatrixReport, QuantizationReport, output_error
from labkit.quantization.rtn import RTNConfig, round_to_nearest
from labkit.quantization.smoothquant import SmoothQuantConfig


class QuantizationInterrupted(RuntimeError):
    """Quantizing stopped in the middle. `converted` names the matrices that are quantized; each layer is done or not.

    With AWQ and SmoothQuant the norms of finished layers, and the matrices that stay in float there, carry folded
    scales. Outside the layers that the message names, all is as it was. The cause is chained.
    """

    def __init__(self, converted: Sequence[str], layers: Sequence[str], cause: BaseException) -> None:
        self.converted = tuple(converted)
        done = "none; everything else is unchanged."
        if layers:
            done = f"{layers[0]} to {layers[-1]} ({len(self.converted)} matrices); outside of these layers nothing is "
            done += "changed. Load the model again to start over."
        super().__init__(f"{type(cause).__name__}: {cause}. Quantized so far: {done}")


# The room of each config: `quantize_layer(task) -> LayerResult`, and whether it needs calibration text. A room with
# `check_linears(linears)` refuses there what its matmul cannot take.
_ROOMS = {
    RTNConfig: (rtn, False),
    GPTQConfig: (gptq, True),
    AWQConfig: (awq, True),
    QATConfig: (qat, True),
    SmoothQuantConfig: (smoothquant, True),
    FP8Config: (fp8, False),
}


@torch.no_grad()
def quantize_(
    model: PreTrainedModel | LoadedModel,
    config: RTNConfig | GPTQConfig | AWQConfig | QATConfig | SmoothQuantConfig | FP8Config,
    calibration: torch.Tensor | Sequence[torch.Tensor] | None = None,
    *,
    modules_to_not_convert: Sequence[str] = ("lm_head",),
    bits_per_module: Mapping[str, int] | None = None,
    progress: bool = True,
) -> QuantizationReport:
    """Replace the matrices of a `transformers` causal LM (or a LoadedModel) by packed ones, in place.

    calibration: token ids `(n_samples, seq_len)`, as `token_batches` returns; RTN and FP8 take none, others need it.
    modules_to_not_convert: names, or dotted parts of names, of matrices to leave alone. Embedding and norms always are
    (`quantize_embedding_` does the former, and comes afterwards: a model of which any part is quantized is refused); a
    head is quantized where this is empty. bits_per_module: another number of bits for some matrices, by full name.
    progress: a bar in a terminal, a line every ten seconds elsewhere.
    Goes layer by layer: beside the model it holds the calibration text's hidden states and one layer's work. Each layer
    sees the inputs that the layers before it, quantized already, give it. A QATConfig goes on from there to train the
    whole model: it returns a QATReport, and leaves the model as it was if anything goes wrong.
    Errors: ValueError, before anything is touched, for what cannot be quantized; QuantizationInterrupted, which says
    which layers are done, for whatever goes wrong in the middle.
    """
    begin = time.perf_counter()
    model = plain_model(model)
    known = " or ".join(kind.__name__ for kind in _ROOMS)
    _check.require(type(config) in _ROOMS, "config", type(config).__name__, f"{known}")
    todo = plan(model, modules_to_not_convert)
    bits = check_bits(todo.linears, bits_per_module or {}, config)
    check_weights(todo.linears, config)
    getattr(_ROOMS[type(config)][0], "check_linears", lambda _: None)(todo.linears)
    ids = None
    if _ROOMS[type(config)][1] or calibration is not None:
        ids = check_calibration(model, calibration)
    if isinstance(config, QATConfig):
        options = {"modules_to_not_convert": modules_to_not_convert, "bits_per_module": bits, "progress": progress}
        start = functools.partial(quantize_, model, config.start_config(), **options)
        return _train(QATRun(model, todo.linears, config, ids, bits), start, progress)
    run = _Run(model, config, bits, ids)
    run.all(todo, progress)
    return QuantizationReport(config, tuple(run.reports), tuple(run.notes), time.perf_counter() - begin)


def _train(run: QATRun, start: Callable[[torch.Tensor | None], QuantizationReport], progress: bool) -> QATReport:
    """Training is of the whole model at once, so that it is all done or nothing."""
    try:
        return run.all(start, progress)
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, QuantizationInterrupted) else error
        raise QuantizationInterrupted((), (), cause) from error


class _Run:
    """One call of `quantize_`, once its arguments are known to be right."""

    def __init__(
        self, model: PreTrainedModel, config: object, bits: Mapping[str, int], ids: torch.Tensor | None
    ) -> None:
        self.model, self.config, self.bits, self.ids = model, config, bits, ids
        self.reports: list[MatrixReport] = []
        self.notes: list[str] = []
        self._layers_done: list[str] = []

    def all(self, todo: Plan, progress: bool) -> None:
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
                    # Nothing reads what the last layer gives: a head takes its inputs from passes of its own.
                    if inputs is not None and i + 1 < len(todo.layers):
                        inputs.advance(layer)
                    update(i + 1)
                if todo.outside:
                    self._outside(todo.outside)
        except BaseException as error:
            done = [name for name, module in self.model.named_modules() if getattr(module, "is_quantized", False)]
            raise QuantizationInterrupted(done, self._layers_done, error) from error
        finally:
            self.model.train(training)

    def _layer(self, name: str, layer: nn.Module, linears: dict[str, nn.Linear], inputs: LayerInputs | None) -> None:
        if linears:
            statistics = {} if inputs is None else inputs.statistics(layer, linears)
            self._convert(LayerTask(name, layer, dict(linears), statistics, self.config, self.bits, self.notes))
            # The last reference to the float weights: they go as their layer is done.
            linears.clear()
            give_back_freed_memory()

    def _outside(self, linears: dict[str, nn.Linear]) -> None:
        """A head reads what the whole model makes: one more pass, where calibration is used at all."""
        statistics = {}
        if self.ids is not None:
            with watch_inputs(linears) as statistics:
                for sample in self.ids:
                    self.model(input_ids=sample[None].to(self.model.device), use_cache=False)
        for name in list(linears):
            one = {name: linears.pop(name)}
            self._convert(LayerTask(name, None, one, statistics, self.config, self.bits, self.notes))
        give_back_freed_memory()

    def _convert(self, task: LayerTask) -> None:
        """Run the algorithm on the task, then write all that it found."""
        result = _ROOMS[type(self.config)][0].quantize_layer(task)
        reports = [self._report(task, name, new) for name, new in result.replacements.items()]
        try:
            self._write(result)
        except BaseException:
            # An interrupt in between: half a layer would be neither the old model nor the new.
            self._write(result)
            raise
        finally:
            self._layers_done.append(task.name)
        self.reports += reports

    def _write(self, result: LayerResult) -> None:
        """Put all of it into the model; twice gives the same as once."""
        for parameter, value in result.folds:
            # Not written into: a tensor may be shared with a copy of the model.
            parameter.data = value.to(parameter.dtype)
        for name, new in result.replacements.items():
            parent, _, child = name.rpartition(".")
            setattr(self.model.get_submodule(parent), child, new.module)

    def _report(self, task: LayerTask, name: str, new: Replacement) -> MatrixReport:
        known = task.statistics.get(name)
        error = None if known is None else output_error(task.linears[name].weight, new.approximation, known.gram)
        return MatrixReport.of(name, task.config_of(name).bits, new.module, error)


@torch.no_grad()
def quantize_embedding_(model: PreTrainedModel | LoadedModel, config: RTNConfig) -> None:
    """Replace the table of the input embedding by a packed one, in place; after `quantize_`, where both are wanted.

    A head that is tied to the table goes with it: both read one packed table, as long as the head's matmul takes it as
    it is (on a CPU in bfloat16 it lies in an order of its own, a second copy).

    Errors: ValueError for a table that is packed already or not finite, and groups that do not divide its width.
    """
    model = plain_model(model)
    table = model.get_input_embeddings()
    # Subclasses do more than look up: Gemma's scales the rows.
    _check.require(type(table) is nn.Embedding, "model", f"an input {type(table).__name__}", "a float nn.Embedding")
    _check.require(
        bool(table.weight.isfinite().all()), "model", "NaN or an infinity in the embedding", "finite weights"
    )
    packed = round_to_nearest(table.weight, config)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight is table.weight:
        model.set_output_embeddings(QuantLinear(packed, head.bias, dtype=table.weight.dtype))
    model.set_input_embeddings(QuantEmbedding(packed, table.weight.dtype))
