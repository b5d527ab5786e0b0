"""AWQ: scale up the few input channels that matter before rounding, and divide where their inputs are made.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan and Han, "AWQ: Activation-aware Weight Quantization for On-Device
LLM Compression and Acceleration", MLSys 2024, equations 4 and 5, with the authors' clipping search.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from labkit import _check
from labkit.models import LoadedModel
from labkit.quantization.calibration import InputStatistics, LayerResult, LayerTask, Replacement
from labkit.quantization.folding import Link, fold, fold_model_, note_what_is_not_scaled, scaled_together
from labkit.quantization.linear import QuantLinear
from labkit.quantization.packing import pack_weight
from labkit.quantization.primitives import Grid, check_format, group_length, minmax_grid

# Parts of a group's range that the clipping search tries first, and steps around the best of them that it tries next.
_SHRINKS = tuple(1 - 0.05 * i for i in range(11))
_STEPS = (-0.05, -0.025, 0.025, 0.05)
# Rounds of that second search, each through all groups of a row.
_ROUNDS = 2


@dataclass(frozen=True)
class AWQConfig:
    """`bits, group_size` as in RTNConfig; `zero_point`: asymmetric. `n_grid`: ratios tried, i / n_grid from 0 on.

    `duo_scaling`: scales also shrink with the size of the weights that they multiply, as in the authors' later code;
    False is equation 5 of the paper. `clip`: search for the range of each group as well.
    """

    bits: int = 4
    group_size: int = 64
    zero_point: bool = True
    n_grid: int = 20
    duo_scaling: bool = True
    clip: bool = True

    def __post_init__(self) -> None:
        for name in ("zero_point", "duo_scaling", "clip"):
            _check.require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        check_format(self.bits, self.group_size, self.sym)
        _check.integer("n_grid", self.n_grid, 1, 100)

    @property
    def sym(self) -> bool:
        """The zero point is the middle code."""
        return not self.zero_point


def _grouped(weight: Tensor, config: AWQConfig) -> Tensor:
    return weight.unflatten(1, (-1, group_length(weight.shape[1], config.group_size)))


def _rounded(weight: Tensor, config: AWQConfig, shrink: float | Tensor = 1.0) -> tuple[Grid, Tensor]:
    """The grid and codes of `weight (out_features, in_features)`, codes `(out_features, groups, group)`."""
    grouped = _grouped(weight, config)
    grid = minmax_grid(grouped, config.bits, config.sym, shrink)
    return grid, grid.encode(grouped)


def _difference(weight: Tensor, config: AWQConfig, shrink: float | Tensor = 1.0) -> Tensor:
    """What rounding changes, in the weight's shape."""
    grid, codes = _rounded(weight, config, shrink)
    return grid.decode(codes).flatten(1).sub_(weight)


def candidate_scales(inputs: Tensor, weights: Tensor, n_grid: int, duo_scaling: bool) -> list[Tensor]:
    """Scales `(channels,)` to try: s = x^r, or x^r / w^(1 - r), over r = i / n_grid, each over sqrt(max s * min s).

    inputs: mean |x| of each channel; weights: its mean |w|, as parts of their group's largest. The first is 1: r = 0.
    A channel without input counts as an average one, since no scale of it matters.
    """
    known = torch.where(inputs > 0, inputs, inputs.mean().clamp_min(1e-8)).log()
    against = weights.clamp_min(1e-4).log() if duo_scaling else torch.zeros_like(known)
    found = [torch.ones_like(known)]
    for ratio in (i / n_grid for i in range(1, n_grid)):
        exponent = ratio * known - (1 - ratio) * against
        scale = (exponent - (exponent.amax() + exponent.amin()) / 2).exp()
        found.append(scale.clamp(1e-4, 1e4))
    return found


def scale_errors(
    weights: Sequence[Tensor], configs: Sequence[AWQConfig], statistics: InputStatistics, link: Link
) -> Iterator[tuple[Tensor, float]]:
    """Each candidate of equation 5, a scale `(channels,)`, ratio 0 first, with its error by equation 4.

    weights: matrices `(out_features, in_features)`, float32, that read one input, each with its config. The error is
    ||(Q(W s) / s - W) X||^2 / ||W X||^2, summed over the matrices; from the inputs' second moments it is tr(D G D^T).
    """
    gram = statistics.gram
    signals = [((weight @ gram) * weight).sum().clamp_min(torch.finfo(gram.dtype).tiny) for weight in weights]
    sizes = [_grouped(weight.abs(), config) for weight, config in zip(weights, configs, strict=True)]
    parts = torch.cat([(size / size.amax(-1, keepdim=True).clamp_min(1e-9)).flatten(1) for size in sizes])
    channels = (link.by_channel(values, torch.mean) for values in (statistics.mean_abs, parts.mean(0)))
    for scale in candidate_scales(*channels, configs[0].n_grid, configs[0].duo_scaling):
        columns, error = link.by_column(scale), 0.0
        for weight, config, signal in zip(weights, configs, signals, strict=True):
            difference = _difference(weight * columns, config).div_(columns)
            error += (((difference @ gram) * difference).sum() / signal).item()
        yield scale, error


def search_scale(
    weights: Sequence[Tensor], configs: Sequence[AWQConfig], statistics: InputStatistics, link: Link
) -> tuple[Tensor, float]:
    """The candidate of `scale_errors` with the least error, and that error; of equals the first."""
    found = [pair for pair in scale_errors(weights, configs, statistics, link) if pair[1] < math.inf]
    _check.require(bool(found), "calibration", "NaN or an infinity in a layer's inputs", "text with finite inputs")
    return min(found, key=lambda pair: pair[1])


def search_clipping(weight: Tensor, gram: Tensor, config: AWQConfig) -> Tensor:
    """How far to narrow each group's range, `(out_features, groups)`, at most 1, for the least output error.

    The authors take a group at a time and minimise its own part of the output, d_g G_gg d_g^T, d what rounding changes.
    But such parts add up in a row's output, where inputs of different groups are correlated: from there on each group
    in turn is set to the best beside what the others have, d_g G_gg d_g^T + 2 sum_h d_h G_hg d_g^T.
    They leave q_proj and k_proj out; on the default model at 4 bits that makes no difference, so none is left out.
    """
    group = group_length(weight.shape[1], config.group_size)
    columns = [slice(start, start + group) for start in range(0, weight.shape[1], group)]
    shrink = torch.ones(len(weight), len(columns), device=weight.device)
    apart = torch.zeros(len(weight), group, device=weight.device)
    for i, part in enumerate(columns):
        _choose(weight[:, part], gram[part, part], apart, config, shrink[:, i], [x - 1 for x in _SHRINKS])
    difference = _difference(weight, config, shrink)
    for _ in range(_ROUNDS if len(columns) > 1 else 0):
        for i, part in enumerate(columns):
            others = difference @ gram[:, part] - difference[:, part] @ gram[part, part]
            difference[:, part] = _choose(
                weight[:, part], gram[part, part], others, config, shrink[:, i], (0.0, *_STEPS)
            )
    return shrink


def _choose(
    weight: Tensor, gram: Tensor, others: Tensor, config: AWQConfig, shrink: Tensor, steps: Sequence[float]
) -> Tensor:
    """Add to each row's `shrink (rows,)`, in place, the step with the least d G d^T + 2 others d^T; returns d.

    One group: weight and others `(rows, group)`. The first step comes before those that do no better.
    """
    started = shrink.clone()
    for i, step in enumerate(steps):
        tried = (started + step).clamp(0.3, 1.0)
        change = _difference(weight, config, tried[:, None])
        error = ((change @ gram + 2 * others) * change).sum(1)
        if i == 0:
            least, kept = error, change
            shrink.copy_(tried)
            continue
        better = error < least
        least = torch.where(better, error, least)
        kept = torch.where(better[:, None], change, kept)
        shrink.copy_(torch.where(better, tried, shrink))
    return kept


def find_scales(task: LayerTask) -> dict[Link, Tensor]:
    """The best scale of each place in the layer where one can be folded and a reader is to be quantized."""
    found = {}
    for link, names in scaled_together(task):
        weights = [task.linears[name].weight.float() for name in names]
        configs = [task.config_of(name) for name in names]
        found[link], _ = search_scale(weights, configs, task.statistics[names[0]], link)
    return found


def quantize_layer(task: LayerTask) -> LayerResult:
    """Scales first, for the whole layer; then each matrix as the folds leave it, rounded under the clipping found."""
    folded = fold(task.module, find_scales(task))
    local = {name: name.removeprefix(f"{task.name}.") for name in task.linears}
    note_what_is_not_scaled(task)
    found: dict[str, Replacement] = {}
    for name, linear in task.linears.items():
        config, columns = task.config_of(name), folded.columns.get(local[name])
        weight, gram = folded.weight(local[name], linear), task.statistics[name].gram
        gram = gram if columns is None else gram / columns / columns[:, None]
        grid, codes = _rounded(weight, config, search_clipping(weight, gram, config) if config.clip else 1.0)
        packed = pack_weight(codes.flatten(1), grid, sym=config.sym)
        module = QuantLinear(packed, folded.bias(local[name], linear), dtype=linear.weight.dtype)
        found[name] = Replacement(module, folded.undo(local[name], packed.dequantize()))
    return LayerResult(found, folded.writes({local[name] for name in found}))


def awq_scale_(model: PreTrainedModel | LoadedModel, config: AWQConfig, calibration: Tensor) -> None:
    """Only AWQ's first half, in place: the scales are found and folded, and nothing is quantized, so that the model
    computes what it did before. calibration: token ids `(n_samples, seq_len)`. Errors: ValueError."""
    _check.require(isinstance(config, AWQConfig), "config", type(config).__name__, "an AWQConfig")
    fold_model_(model, config, calibration, find_scales)
