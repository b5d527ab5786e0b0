"""What `quantize_` is to quantize, and what it refuses before it touches anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit.kernels.bits import PACKED_BITS
from labkit.quantization.calibration import decoder_layers
from labkit.quantization.primitives import group_length


@dataclass(frozen=True)
class Plan:
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


def _check_parts(model: PreTrainedModel, modules_to_not_convert: Sequence[str]) -> None:
    """Refuse a name that matches no module: a slip would quantize what was to be left alone. "lm_head", the default of
    `quantize_`, may be missing."""
    one = isinstance(modules_to_not_convert, str)
    _check.require(not one, "modules_to_not_convert", modules_to_not_convert, "a list")
    names = [name for name, _ in model.named_modules() if name]
    words = dict.fromkeys(word for name in names for word in name.split(".") if not word.isdecimal())
    for part in modules_to_not_convert:
        known = part == "lm_head" or any(_left_alone(name, [part]) for name in names)
        takes = f"a module's name or a dotted part of it, such as {_check.near(part, words)}"
        _check.require(known, "modules_to_not_convert", part, takes)


def plan(model: PreTrainedModel, modules_to_not_convert: Sequence[str]) -> Plan:
    """Which matrices are to be quantized.

    Errors: ValueError for what is no transformers model, where there are no such matrices, or some are quantized
    already, and for names that match no module.
    """
    _check.require(isinstance(model, PreTrainedModel), "model", type(model).__name__, "a transformers causal LM")
    _check_parts(model, modules_to_not_convert)
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
    return Plan(tuple(per_layer), outside)


def check_weights(linears: Mapping[str, nn.Linear], config: object) -> None:
    """Refuse, before anything is touched, what the config cannot quantize: NaN, infinities, groups that do not fit."""
    for name, linear in linears.items():
        if hasattr(config, "group_size"):
            group_length(linear.in_features, config.group_size, name)
        got = f"NaN or an infinity in {name}.weight"
        _check.require(bool(linear.weight.isfinite().all()), "model", got, "finite weights")


def check_bits(
    linears: Mapping[str, nn.Linear], bits_per_module: Mapping[str, int], config: object = None
) -> dict[str, int]:
    """Bits by the full name of a matrix that is to be quantized. Errors: ValueError for another name or width, and for
    any where the config's bits are no field of it, but fixed."""
    fixed = dataclasses.is_dataclass(config) and "bits" not in {field.name for field in dataclasses.fields(config)}
    takes = f"nothing with a {type(config).__name__}, whose matrices all have 8 bits"
    _check.require(not (fixed and bits_per_module), "bits_per_module", dict(bits_per_module), takes)
    for name, bits in bits_per_module.items():
        _check.require(name in linears, "bits_per_module", name, _check.near(name, linears))
        field = f"bits_per_module[{name!r}]"
        _check.choice(field, _check.integer(field, bits), PACKED_BITS)
    return dict(bits_per_module)
