"""The steps that `quantization_lab` runs: errors by layer, one block by a method, decode steps. No widgets here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from labkit.engine import Decoder
from labkit.kernels import PackedWeight, choose_backend
from labkit.labs._quantization_result import BlockErrors, LayerErrors, QuantizationParams, Speed
from labkit.measure import Timing, synchronize
from labkit.quantization import AWQConfig, GPTQConfig, QuantLinear, awq, gptq
from labkit.quantization.calibration import InputStatistics, LayerInputs, LayerTask
from labkit.quantization.packing import read_bytes
from labkit.quantization.plan import Plan

Cancelled = Callable[[], bool]

_ROOMS = {"AWQ": (awq, AWQConfig), "GPTQ": (gptq, GPTQConfig)}
# Between two views of a figure that grows.
_SHOW_EVERY_S = 0.5
_CONTEXT = 32
_MOST_STEPS, _LEAST_STEPS, _STEPS_S = 12, 2, 1.2


@dataclass(frozen=True)
class Inputs:
    """What some text brings to each matrix of the float model: by name, the inputs `(tokens, in_features)` and the sum
    of the squares that the matrix makes of them."""

    of: Mapping[str, torch.Tensor]
    energy: Mapping[str, float]
    tokens: int


@torch.no_grad()
def capture_inputs(model: PreTrainedModel, todo: Plan, ids: torch.Tensor) -> Inputs:
    """One forward pass of `ids (n, seq_len)`. Matrices that read one tensor share it."""
    found: dict[str, torch.Tensor] = {}
    energy: dict[str, float] = {}

    def see(name: str, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> None:
        # A view of the same memory for q, k and v: nothing is held twice.
        found[name] = x.flatten(0, -2)
        energy[name] = (y if bias is None else y - bias).float().square().sum().item()

    handles = [
        linear.register_forward_hook(lambda module, args, out, name=name: see(name, args[0], out, module.bias))
        for name, linear in todo.linears.items()
    ]
    try:
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return Inputs(found, energy, ids.numel())


@torch.no_grad()
def relative_error(weight: torch.Tensor, approximation: torch.Tensor, inputs: Inputs, name: str) -> float:
    """|X (W' - W)^T|^2 / |X W^T|^2 over the captured inputs X of the matrix."""
    difference = approximation.float() - weight.float()
    return (inputs.of[name].float() @ difference.T).square().sum().item() / inputs.energy[name]


def layer_errors(
    todo: Plan, packed: Mapping[str, PackedWeight], inputs: Inputs, cancelled: Cancelled
) -> Iterator[LayerErrors]:
    """Each matrix of `packed` beside its float one; yields what is known twice a second, and the whole at last."""
    by_kind: dict[str, tuple[float, ...]] = {}
    shown = time.perf_counter()
    for i, (_, _, linears) in enumerate(todo.layers):
        if cancelled():
            return
        for name, linear in linears.items():
            kind = name.rpartition(".")[2]
            error = relative_error(linear.weight, packed[name].dequantize(), inputs, name)
            by_kind[kind] = (*by_kind.get(kind, ()), error)
        last = i + 1 == len(todo.layers)
        if last or time.perf_counter() - shown > _SHOW_EVERY_S:
            shown = time.perf_counter()
            yield LayerErrors(dict(by_kind), inputs.tokens)


@dataclass(frozen=True)
class Block:
    """One decoder layer, and what its calibration text brings to its matrices."""

    index: int
    statistics: Mapping[str, InputStatistics]
    tokens: int


@torch.no_grad()
def calibrate_block(model: PreTrainedModel, todo: Plan, ids: torch.Tensor) -> Block:
    """Statistics of the layer in the middle: the calibration text goes through the float layers before it."""
    middle = len(todo.layers) // 2
    inputs = LayerInputs(model, ids, todo.layers[0][1])
    for _, layer, _ in todo.layers[:middle]:
        inputs.advance(layer)
    _, layer, linears = todo.layers[middle]
    return Block(middle, inputs.statistics(layer, linears), ids.numel())


@torch.no_grad()
def quantize_block(
    todo: Plan, block: Block, params: QuantizationParams, rtn: Mapping[str, float], inputs: Inputs
) -> BlockErrors:
    """One layer by the method of `params`, in full; nothing is put into the model. `rtn` is the error of
    round-to-nearest by kind, over the same `inputs`."""
    room, config_class = _ROOMS[params.method]
    config = config_class(bits=params.bits, group_size=params.group_size)
    name, layer, linears = todo.layers[block.index]
    begin = time.perf_counter()
    result = room.quantize_layer(LayerTask(name, layer, dict(linears), block.statistics, config))
    seconds = time.perf_counter() - begin
    errors = {
        name.rpartition(".")[2]: relative_error(linears[name].weight, new.approximation, inputs, name)
        for name, new in result.replacements.items()
    }
    return BlockErrors(block.index, params.method, errors, dict(rtn), block.tokens, seconds)


def measure_decode(model: PreTrainedModel, bandwidth: float, cancelled: Cancelled) -> Speed | None:
    """A few decode steps of one sequence; None when cancelled in between. Slow ones are measured fewer times."""
    decoder = Decoder(model)
    decoder.fill_cache(1, _CONTEXT)
    length, token = decoder.length, torch.ones(1, 1, dtype=torch.int64, device=decoder.device)
    samples: list[float] = []
    for i in range(1 + _MOST_STEPS):
        if len(samples) >= _LEAST_STEPS and sum(samples) > _STEPS_S:
            break
        if cancelled():
            return None
        synchronize(decoder.device)
        begin = time.perf_counter()
        decoder.forward(token, logits_to_keep=1)
        synchronize(decoder.device)
        if i:  # the first one warms up
            samples.append(time.perf_counter() - begin)
        decoder.crop(length)
    return Speed(Timing.of(samples), read_bytes(model), *_backend_of(model), bandwidth)


def _backend_of(model: PreTrainedModel) -> tuple[str, str, bool]:
    """Backend, reason, and whether it is the packed matmul, of the matrices of a decode step."""
    linear = next((module for module in model.modules() if isinstance(module, QuantLinear)), None)
    if linear is None:
        weight = next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).weight
        x = weight.new_empty(1, weight.shape[1])
        choice = choose_backend("dense_linear", x, weight)
        return choice.name, choice.reason, False
    x = torch.empty(1, linear.in_features, dtype=torch.bfloat16, device=model.device)
    choice = choose_backend("quantized_linear", x, linear.weight)
    return choice.name, choice.reason, not isinstance(linear.weight, PackedWeight)
