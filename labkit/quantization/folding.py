"""Which operation comes before each matrix of a decoder layer, and how a scale of its inputs is folded into it.

W x = (W diag(s)) (diag(1/s) x): columns of the matrix are multiplied by s, and whatever makes x divides by it. Where
that is a norm's gain or the rows of another matrix, nothing is left to compute at run time, and the layer's function
does not change. AWQ and SmoothQuant both rest on it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit.models import LoadedModel, plain_model
from labkit.quantization.calibration import LayerInputs, LayerTask, check_calibration
from labkit.quantization.plan import check_weights, plan

# Layers whose norms are x / rms(x) * gain, whose MLP is down(act(gate(x)) * up(x)) and in which nothing but attention's
# weighted sum over tokens stands between v_proj and o_proj.
_FAMILIES = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


@dataclass(frozen=True)
class Link:
    """An operation and the matrices of the same layer that read what it writes; dotted names in the layer.

    With grouped-query attention each channel that v_proj writes is read in `repeats` columns of o_proj, one for each
    query head that shares the KV head of `head_dim` channels: those must have one scale.
    """

    writer: str
    readers: tuple[str, ...]
    repeats: int = 1
    head_dim: int = 1

    def by_channel(self, values: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
        """`values (in_features,)` of the readers' columns as `(channels,)`; `reduce(values, dim)` over the heads."""
        return reduce(values.view(-1, self.repeats, self.head_dim), 1).flatten()

    def by_column(self, values: Tensor) -> Tensor:
        """`values (channels,)` as the readers' columns see them, `(in_features,)`."""
        heads = values.view(-1, 1, self.head_dim)
        return heads.expand(-1, self.repeats, -1).flatten()


def links(layer: nn.Module | None) -> tuple[Link, ...]:
    """The places where a scale can be folded exactly; none for a head (None) and for a family that is not known.

    Of a Llama, Mistral, Qwen2 or Qwen3 layer: input norm to q, k, v; v to o; norm to gate and up; up to down. The gate
    is no writer: its activation function stands in between.
    """
    if type(layer).__name__ not in _FAMILIES:
        return ()
    attention = layer.self_attn
    repeats = attention.o_proj.in_features // attention.v_proj.out_features
    return (
        Link("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Link("self_attn.v_proj", ("self_attn.o_proj",), repeats, attention.head_dim),
        Link("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        Link("mlp.up_proj", ("mlp.down_proj",)),
    )


def scaled_together(task: LayerTask) -> Iterator[tuple[Link, list[str]]]:
    """The places in the layer where a scale can be folded, each with the matrices to be quantized that read it."""
    for link in links(task.module):
        names = [name for part in link.readers if (name := f"{task.name}.{part}") in task.linears]
        if names:
            yield link, names


def note_what_is_not_scaled(task: LayerTask) -> None:
    """Name, in the task's notes, the matrices that no scale can be found for."""
    scaled = {name for _, names in scaled_together(task) for name in names}
    plain = [name for name in task.linears if name not in scaled]
    if plain:
        task.notes.append(f"{', '.join(plain)}: no operation before it that a scale can be folded into; not scaled")


@dataclass(frozen=True)
class Folded:
    """A layer with scales folded in, none of it written yet; dotted names in the layer.

    `columns[name] (in_features,)`: what a matrix's columns are multiplied with; `rows[name] (out_features,)`: what its
    rows and bias are divided by; `gains[name]`: the new gain of a norm.
    """

    layer: nn.Module | None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    gains: Mapping[str, Tensor] = field(default_factory=dict)

    def weight(self, name: str, linear: nn.Linear) -> Tensor:
        """The matrix as it is to be from now on, float32 `(out_features, in_features)`."""
        weight = linear.weight.float()
        if name in self.columns:
            weight = weight * self.columns[name]
        return weight / self.rows[name][:, None] if name in self.rows else weight

    def bias(self, name: str, linear: nn.Linear) -> Tensor | None:
        """The bias that goes with it, in the dtype that it has."""
        if linear.bias is None or name not in self.rows:
            return linear.bias
        return (linear.bias.float() / self.rows[name]).to(linear.bias.dtype)

    def undo(self, name: str, approximation: Tensor) -> Tensor:
        """What stands in for `weight(name)`, as the weight that it is on the layer's former input and output."""
        if name in self.columns:
            approximation = approximation / self.columns[name]
        return approximation * self.rows[name][:, None] if name in self.rows else approximation

    def writes(self, replaced: Container[str]) -> list[tuple[Tensor, Tensor]]:
        """Parameters and their new values: gains, and the matrices that stay as they are but for the scales; those in
        `replaced` are left out."""
        found = [(self.layer.get_submodule(name).weight, gain) for name, gain in self.gains.items()]
        for name in dict.fromkeys((*self.columns, *self.rows)):
            if name not in replaced:
                linear = self.layer.get_submodule(name)
                found.append((linear.weight, self.weight(name, linear)))
                if linear.bias is not None:
                    found.append((linear.bias, self.bias(name, linear)))
        return found


def fold(layer: nn.Module | None, scales: Mapping[Link, Tensor]) -> Folded:
    """Fold `scales`, one `(channels,)` for each link, finite and above 0, into the layer's matrices and norms."""
    columns: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    gains: dict[str, Tensor] = {}
    for link, scale in scales.items():
        writer = layer.get_submodule(link.writer)
        if isinstance(writer, nn.Linear):
            rows[link.writer] = scale
        else:
            gains[link.writer], scale = _divided_gain(writer.weight, scale)
        columns |= dict.fromkeys(link.readers, link.by_column(scale))
    return Folded(layer, columns, rows, gains)


def _divided_gain(gain: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """gain / scale in the gain's dtype, and the scale that this really divides by.

    In bfloat16 the quotient is rounded; the readers then multiply by what was divided by, so that the fold is exact.
    """
    new = (gain.float() / scale).to(gain.dtype)
    real = gain.float() / new.float()
    return new, torch.where((new != 0) & real.isfinite(), real, scale)


@torch.no_grad()
def fold_model_(
    model: PreTrainedModel | LoadedModel,
    config: object,
    calibration: Tensor,
    find: Callable[[LayerTask], Mapping[Link, Tensor]],
) -> None:
    """Fold the scales that `find` gives for each decoder layer, in place, and quantize nothing: the model computes
    what it did before, up to rounding. calibration: token ids `(n_samples, seq_len)`.

    Errors: ValueError, before anything is touched, for what is no transformers model, for one that is quantized, for
    weights that are not finite or that the config's groups do not fit, and for calibration that is not that.
    """
    model = plain_model(model)
    layers = plan(model, ()).layers
    for _, _, linears in layers:
        check_weights(linears, config)
    ids = check_calibration(model, calibration)
    training = model.training
    model.eval()
    try:
        inputs = LayerInputs(model, ids, layers[0][1])
        for i, (name, layer, linears) in enumerate(layers):
            task = LayerTask(name, layer, linears, inputs.statistics(layer, linears), config)
            for parameter, value in fold(layer, find(task)).writes(()):
                parameter.data = value.to(parameter.dtype)
            if i + 1 < len(layers):
                inputs.advance(layer)
    finally:
        model.train(training)
