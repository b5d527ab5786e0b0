"""Exercise `awq_scale`: scales of a layer's inputs, found by a grid search, under which rounding hurts less.

Lin et al. 2024, equations 4 and 5. The check gives the quantizer, so that it sees which scales were tried.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from labkit.exercises._exercise import Answer, Exercise, Failed, expect, without_labkit
from labkit.exercises._tensors import as_tensor, normal

_SIGNATURE = "awq_scale(weight, inputs, quantize, n_grid=20) -> scale (in_features,)"
_OWN = ("quantization/awq", "quantization/calibration", "quantization/api")
_OUT, _IN, _TOKENS, _GROUP, _BITS = 64, 32, 48, 16, 3
_SALIENT = 5
_N_GRID = 20


def _round(weight: Tensor) -> Tensor:
    """Asymmetric round-to-nearest at 3 bits in groups of 16, and back to floats."""
    groups = weight.reshape(len(weight), -1, _GROUP)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) / (2**_BITS - 1)).clamp(min=1e-30)
    zero = (-low / step).round()
    codes = ((groups / step).round() + zero).clamp(0, 2**_BITS - 1)
    return ((codes - zero) * step).reshape(weight.shape)


@dataclass
class _Layer:
    """A linear layer with its inputs, and the scales under which its weight was quantized."""

    weight: Tensor
    inputs: Tensor
    tried: list[Tensor] = field(default_factory=list)

    def quantize(self, weight: Tensor) -> Tensor:
        """What the learner's function is given."""
        if not isinstance(weight, Tensor) or weight.shape != self.weight.shape:
            shape = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"quantize takes a weight of the shape {tuple(self.weight.shape)}; got {shape}")
        self.tried.append((weight.detach().double() / self.weight.double()).median(0).values)
        return _round(weight)

    def uneven(self) -> list[Tensor]:
        """The scales tried that are not the same for all channels."""
        return [scale for scale in self.tried if float(scale.max() - scale.min()) > 1e-3]

    def error(self, scale: Tensor) -> float:
        """||Q(W s)(x / s) - W x||², in float64."""
        weight = self.weight.double()
        change = _round(weight * scale) / scale - weight
        return float((self.inputs.double() @ change.T).square().sum())

    def nearest(self) -> float:
        """The error of plain round-to-nearest."""
        return self.error(torch.ones(_IN, dtype=torch.float64))

    def best_of_grid(self, n_grid: int) -> float:
        """The smallest error of the ratios i / n_grid."""
        mean = self.inputs.double().abs().mean(0)
        return min(self.error(mean ** (i / n_grid)) for i in range(n_grid))


def _layer(seed: int, *, salient: float = 30.0, heavy: float = 1.0, dead: int | None = None) -> _Layer:
    """One input channel `salient` times as large as the rest, its weights `heavy` times; `dead`: one that is zero."""
    weight, inputs = normal(seed, _OUT, _IN), normal(seed + 1, _TOKENS, _IN)
    inputs = inputs * (1 + 0.2 * normal(seed + 2, _IN)).abs().clamp(min=0.3)
    weight[:, _SALIENT] *= heavy
    inputs[:, _SALIENT] *= salient
    if dead is not None:
        inputs[:, dead] = 0
    return _Layer(weight, inputs)


def _run(answer: Answer, layer: _Layer, *n_grid: int) -> Tensor:
    layer.tried.clear()
    given = (layer.weight.clone(), layer.inputs.clone(), layer.quantize, *n_grid)
    value = without_labkit(lambda: answer(*given), _OWN)
    scale = as_tensor(value, (_IN,), "the scale")
    low = float(scale.min())
    expect(low > 0, f"every scale should be positive, since the inputs are divided by it; the smallest is {low:g}")
    return scale


def _test_never_worse(answer: Answer) -> None:
    """A layer in which the large inputs meet the largest weights: each ratio above 0 loses."""
    layer = _layer(40, salient=3.0, heavy=6.0)
    scale = _run(answer, layer)
    expect(len(layer.tried) > 0, "your function never called quantize: try quantize(weight * scale) for each ratio")
    same = "quantize was given the weight with no scale, or with one that is the same for every channel, each time"
    expect(len(layer.uneven()) > 0, f"{same}: give it weight * scale")
    error, nearest = layer.error(scale), layer.nearest()
    largest = error >= 0.999 * max(layer.error(tried) for tried in layer.tried if bool((tried > 0).all()))
    why = (
        "is the smallest error kept, and not the largest?"
        if largest and len(layer.tried) > 1
        else "ratio 0 leaves the weight as it is, and has to be among those tried"
    )
    worse = f"the error found should never be above round-to-nearest's; it is {error / nearest:.2f} times that"
    expect(error <= nearest * (1 + 1e-6), f"{worse}: {why}")


def _why_no_gain(layer: _Layer) -> str:
    """Why a salient channel was not helped, from the scales that were tried."""
    if not any(int(tried.argmax()) == _SALIENT for tried in layer.uneven()):
        return "its scale is not the largest: use the magnitude of the inputs, mean |x|, and not that of the weights"
    return "are the inputs divided by the scale that the weight is multiplied with, before the two errors are compared?"


def _test_salient(answer: Answer) -> float:
    """The error as a share of round-to-nearest's, where one channel's inputs are 30 times the others'."""
    layer = _layer(50)
    scale = _run(answer, layer)
    error, nearest, best = layer.error(scale), layer.nearest(), layer.best_of_grid(_N_GRID)
    gain = (
        f"with one input channel 30 times the others, the error can fall to {best / nearest:.2f} of round-to-nearest's"
    )
    expect(error < 0.75 * nearest, f"{gain}; yours is {error / nearest:.2f} of it: {_why_no_gain(layer)}")
    grid = "the error should be no more than that of each ratio i / n_grid, i from 0 to n_grid - 1"
    expect(error <= 1.01 * best, f"{grid}; the best has {best:.4g}, yours {error:.4g}")
    middle = float((scale.max() * scale.min()).sqrt())
    expect(abs(middle - 1) < 0.01, f"normalize: divide the scale by sqrt(max * min), which is {middle:.3g} in yours")
    return error / nearest


def _test_grid(answer: Answer) -> None:
    layer = _layer(60)
    only = _run(answer, layer, 1)
    ones = torch.allclose(only, torch.ones_like(only))
    expect(ones, "with n_grid = 1 the only ratio is 0, and every scale should be 1: try i / n_grid, i below n_grid")
    error, best = layer.error(_run(answer, layer, 3)), layer.best_of_grid(3)
    expect(error <= 1.01 * best, "with n_grid = 3 the error should be no more than that of the ratios 0, 1/3 and 2/3")


def _test_dead_channel(answer: Answer) -> None:
    layer = _layer(70, dead=20)
    try:
        scale = _run(answer, layer)
    except Failed as failure:
        keep = "keep mean |x| above a small number"
        raise Failed(f"with a channel whose inputs are all zero: {failure}; {keep}") from failure
    share = layer.error(scale) / layer.nearest()
    none = "with a channel whose inputs are all zero, the other channels should gain as before; the error is"
    keep = "Does 0 ** ratio make the other scales infinite or NaN? Keep mean |x| above a small number"
    expect(share < 0.75, f"{none} {share:.2f} of round-to-nearest's. {keep}")


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_never_worse(answer)
    share = _test_salient(answer)
    _test_grid(answer)
    _test_dead_channel(answer)
    return f"the best of the grid, never worse than round-to-nearest; {share:.2f} of its error with one salient channel"


AWQ_SCALE = Exercise(
    name="awq_scale",
    chapter=2,
    task="AWQ's search: the scale of each input channel under which the quantized layer errs least.",
    signature=_SIGNATURE,
    hints=(
        "An input channel with large values makes its weights' rounding errors count more. Which weights should be "
        "rounded on a finer grid, and how does a scale do that without changing the product?",
        "For each ratio i / n_grid: scale = mean |x| ** ratio, over the tokens, divided by sqrt(max * min) of itself; "
        "the error is that of quantize(weight * scale) with inputs / scale, against weight with inputs. Keep the best.",
        "mean = inputs.abs().mean(0).clamp(min=1e-4); loss = ((inputs / scale) @ quantize(weight * scale).T - inputs @ "
        "weight.T).square().sum(); keep the scale of the smallest loss, ratio 0 included; return it.",
    ),
    test=_test,
)
