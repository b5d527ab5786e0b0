"""What flows into each matrix on calibration text, layer by layer, with one layer's work in memory at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check


@dataclass
class InputStatistics:
    """Of all calibration tokens' inputs x `(in_features,)` to a matrix, in float32: `gram`, the mean of x x^T
    `(in_features, in_features)`; `mean_abs` and `max_abs` of each input feature; and how many `tokens`."""

    gram: torch.Tensor
    mean_abs: torch.Tensor
    max_abs: torch.Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, in_features: int, device: torch.device) -> InputStatistics:
        """Before the first token."""
        zeros = torch.zeros(in_features, device=device)
        return cls(torch.zeros(in_features, in_features, device=device), zeros, zeros.clone())

    def add(self, x: torch.Tensor) -> None:
        """Take in `x (..., in_features)`."""
        rows = x.reshape(-1, x.shape[-1]).float()
        if not len(rows):
            return
        keep = self.tokens / (self.tokens + rows.shape[0])
        share = 1 / (self.tokens + rows.shape[0])
        self.gram.addmm_(rows.T, rows, beta=keep, alpha=share)
        magnitudes = rows.abs()
        self.mean_abs.mul_(keep).add_(magnitudes.sum(0), alpha=share)
        torch.maximum(self.max_abs, magnitudes.amax(0), out=self.max_abs)
        self.tokens += rows.shape[0]


@dataclass(frozen=True)
class LayerTask:
    """One decoder layer to be quantized: its matrices by full name, what flows into each, and each one's config.

    `module` is the layer, None for a head; matrices that read the same input share one `InputStatistics` object.
    `notes` takes sentences for the report.
    """

    name: str
    module: nn.Module | None
    linears: Mapping[str, nn.Linear]
    statistics: Mapping[str, InputStatistics]
    config: object
    bits_per_module: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def config_of(self, name: str) -> object:
        """The config with the bits that were asked for this matrix alone."""
        bits = self.bits_per_module.get(name)
        return self.config if bits is None else dataclasses.replace(self.config, bits=bits)

    def by_input(self) -> list[list[str]]:
        """Names of matrices grouped by the input that they share, in order."""
        groups: dict[int, list[str]] = {}
        for name in self.linears:
            groups.setdefault(id(self.statistics[name]), []).append(name)
        return list(groups.values())


@dataclass(frozen=True)
class Replacement:
    """What takes a matrix's place, and the weight `(out_features, in_features)` that it applies to the matrix's former
    input: what was folded into the operation before is undone in it, so that the two can be compared."""

    module: nn.Module
    approximation: torch.Tensor


@dataclass(frozen=True)
class LayerResult:
    """What an algorithm makes of a task. Nothing is touched before all of it is known: then each of `folds`, a
    parameter and its new value, is written, and each replacement put in the place of its name."""

    replacements: Mapping[str, Replacement]
    folds: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()


def check_calibration(model: PreTrainedModel, calibration: object) -> torch.Tensor:
    """Calibration token ids as `(n_samples, seq_len)`, from that or from as many 1-D tensors of one length.

    Errors: ValueError for none, for samples of unequal length, which would be padded or left out in silence, for one
    token or more than the positions that the config names, and for ids outside the vocabulary.
    """
    takes = "token ids (n_samples, seq_len), as token_batches returns"
    if isinstance(calibration, Sequence) and not isinstance(calibration, str):
        _check.require(len(calibration) > 0, "calibration", "no samples", takes)
        lengths = [_check.tensor("calibration", sample, ndim=1).shape[0] for sample in calibration]
        short = min(range(len(lengths)), key=lengths.__getitem__)
        got = f"sample {short} of {lengths[short]} tokens beside others of {max(lengths)}"
        _check.require(lengths[short] == max(lengths), "calibration", got, "samples of one length")
        calibration = torch.stack(list(calibration))
    _check.require(calibration is not None, "calibration", None, takes)
    ids = _check.tensor("calibration", calibration, ndim=2, dtypes=(torch.int64, torch.int32))
    # Where positions are no table and no rotation, such as ALiBi's, a model has no longest text.
    positions = getattr(model.config, "max_position_embeddings", None)
    got, span = f"shape {tuple(ids.shape)}", "2 tokens or more" if positions is None else f"2 to {positions} tokens"
    ok = ids.shape[0] > 0 and 2 <= ids.shape[1] and (positions is None or ids.shape[1] <= positions)
    _check.require(ok, "calibration", got, f"{takes}, at least one sample of {span}")
    low, high, vocab = int(ids.min()), int(ids.max()), model.config.vocab_size
    _check.require(0 <= low and high < vocab, "calibration", f"ids from {low} to {high}", f"ids from 0 to {vocab - 1}")
    return ids.long()


def decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The model's stack of layers and its name in the model. Errors: ValueError for a model that has none."""
    depth = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    _check.require(False, "model", type(model).__name__, "a causal LM with a list of num_hidden_layers decoder layers")


class _Captured(Exception):
    """Stops a forward pass once what was wanted of it is known."""


class LayerInputs:
    """The hidden states that enter the next layer, `(1, seq_len, hidden_size)` for each sample, and what else a layer
    is called with. `advance(layer)` replaces them by that layer's output."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, first: nn.Module) -> None:
        self.hidden: list[torch.Tensor] = []
        self._first = first
        # Alike for all samples, which have one length and no padding, but not for all layers: a model may mix kinds of
        # attention, each with its mask and its positions. So the first sample goes as far as the last layer.
        self._kwargs: dict[nn.Module, dict[str, object]] = {}
        _, layers = decoder_layers(model)

        def capture(layer: nn.Module, args: tuple, kwargs: dict) -> None:
            rest = dict(kwargs)
            hidden = args[0] if args else rest.pop("hidden_states")
            if layer is first:
                self.hidden.append(hidden)
            self._kwargs[layer] = rest
            if len(self._kwargs) == len(layers):
                raise _Captured

        handles = [layer.register_forward_pre_hook(capture, with_kwargs=True) for layer in layers]
        try:
            for sample in ids:
                try:
                    model(input_ids=sample[None].to(model.device), use_cache=False)
                except _Captured:
                    pass
        finally:
            for handle in handles:
                handle.remove()

    def run(self, layer: nn.Module) -> Iterator[torch.Tensor]:
        """The layer's output for each sample; what is held stays."""
        kwargs = self._kwargs.get(layer, self._kwargs[self._first])
        for hidden in self.hidden:
            out = layer(hidden, **kwargs)
            yield out[0] if isinstance(out, tuple) else out

    def advance(self, layer: nn.Module) -> None:
        """Hold the layer's outputs from now on; each sample's input is let go as soon as its output is there."""
        for i, out in enumerate(self.run(layer)):
            self.hidden[i] = out

    def statistics(self, layer: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, InputStatistics]:
        """What flows into each of the layer's matrices."""
        with watch_inputs(linears) as found:
            for _ in self.run(layer):
                pass
        return found


class watch_inputs:
    """While it is open, takes the statistics of what flows into each of `linears`; those fed by one tensor share one.

    `with watch_inputs(linears) as found:` fills `found`, by name.
    """

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        self._linears = linears
        self.found: dict[str, InputStatistics] = {}
        self._owner: dict[str, str] = {}
        self._latest: tuple[torch.Tensor, str] | None = None

    def __enter__(self) -> dict[str, InputStatistics]:
        self._handles = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self._see(name, args[0]))
            for name, linear in self._linears.items()
        ]
        return self.found

    def __exit__(self, *_: object) -> None:
        self._latest = None
        for handle in self._handles:
            handle.remove()

    def _see(self, name: str, x: torch.Tensor) -> None:
        """The first pass finds whose input is the very tensor of the one before; from then on one counts for both."""
        if name not in self._owner:
            same = self._latest is not None and self._latest[0] is x
            self._owner[name] = self._latest[1] if same else name
            if not same:
                self.found[name] = InputStatistics.empty(x.shape[-1], x.device)
            self.found[name] = self.found[self._owner[name]]
        if self._owner[name] == name:
            self._latest = (x, name)
            self.found[name].add(x)
