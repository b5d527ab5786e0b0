"""Ways to generate, timed in turns on the same prompts, and whether their outputs are the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit._table import Table
from labkit.engine.decode import Decoder
from labkit.measure import device_lock
from labkit.models import LoadedModel
from labkit.speculative.stats import SpeculativeStats

# Tokens over which rounding is measured, one at a time and all at once.
_NOISE_SPAN = 16


@dataclass(frozen=True)
class Run:
    """One generation: `tokens (1, prompt + new)`, how long all of it took, and what was counted, if anything was."""

    tokens: torch.Tensor
    seconds: float
    stats: SpeculativeStats | None = None


@dataclass(frozen=True)
class Difference:
    """Where two outputs part: the place in the sequence, what either has there (None: its end), how far the lower of
    the two logits lies below the highest, and what rounding alone changes there (the module's `logit_noise`)."""

    position: int
    tokens: tuple[int | None, int | None]
    gap: float
    noise: float

    @property
    def within_noise(self) -> bool:
        """Whether rounding alone can have chosen."""
        return self.gap <= self.noise


@torch.inference_mode()
def logit_noise(target: Decoder, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The largest difference between the logits of one-token steps and of one step over the same last tokens (at most
    16) of `tokens (1, n)`, and the logits `(vocab,)`, float32, after them all as one-token steps give them."""
    span = min(_NOISE_SPAN, tokens.shape[1])
    start = tokens.shape[1] - span
    target.reset()
    if start:
        target.forward(tokens[:, :start], logits_to_keep=1)
    together = target.forward(tokens[:, start:])[0].float()
    target.crop(start)
    single = torch.cat([target.forward(tokens[:, i : i + 1])[0].float() for i in range(start, tokens.shape[1])])
    return float((together - single).abs().max()), single[-1]


def first_difference(
    target: Decoder | LoadedModel | PreTrainedModel, a: torch.Tensor, b: torch.Tensor
) -> Difference | None:
    """The first place where `a (1, n)`, the reference, and `b (1, m)` differ; None for the same tokens.

    The gap is that of the target's two largest logits where those two tokens are the ones chosen, and more elsewhere;
    where one output has ended it is infinite. A target that is a Decoder forgets what its cache holds.
    """
    for name, value in (("a", a), ("b", b)):
        _check.tensor(name, value, ndim=2, dtypes=(torch.int64,))
        _check.require(len(value) == 1, name, f"{len(value)} rows", "one")
    left, right = a[0].tolist(), b[0].tolist()
    if left == right:
        return None
    shorter = min(len(left), len(right))
    position = next((i for i in range(shorter) if left[i] != right[i]), shorter)
    _check.require(position > 0, "b", "another first token", "an output after the same prompt")
    target = target if isinstance(target, Decoder) else Decoder(target)
    noise, logits = logit_noise(target, a[:, :position])
    tokens = tuple(ids[position] if position < len(ids) else None for ids in (left, right))
    if None in tokens:
        return Difference(position, tokens, float("inf"), noise)
    gap = float(logits.max() - logits[list(tokens)].min())
    return Difference(position, tokens, gap, noise)


@dataclass(frozen=True)
class MethodResult:
    """One method over the prompts: new tokens and the median of the seconds of each; all counts of one pass over the
    prompts; of each prompt, where its output differs from the first method's. `unequal`: prompts where it does."""

    name: str
    new_tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    stats: SpeculativeStats | None
    differences: tuple[Difference | None, ...]

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over all medians."""
        return sum(self.new_tokens) / sum(self.seconds)

    @property
    def unequal(self) -> int:
        """Prompts where its output differs by more than rounding explains."""
        return sum(found is not None and not found.within_noise for found in self.differences)

    @property
    def rounded(self) -> int:
        """Prompts where its output differs, and rounding explains it."""
        return sum(found is not None and found.within_noise for found in self.differences)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods beside the first of them. Renders as a table."""

    methods: tuple[MethodResult, ...]

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()

    def of(self, name: str) -> MethodResult:
        """Errors: ValueError for an unknown name, with the near ones."""
        _check.choice("name", name, [method.name for method in self.methods])
        return next(method for method in self.methods if method.name == name)

    def ratios(self, name: str, over: str | None = None) -> tuple[float, ...]:
        """How many times as fast as `over` (the first method), prompt by prompt: tokens a second over its."""
        ours, base = self.of(name), self.of(over) if over else self.methods[0]
        rates = [[n / s for n, s in zip(method.new_tokens, method.seconds, strict=True)] for method in (ours, base)]
        return tuple(a / b for a, b in zip(*rates, strict=True))

    def ratio(self, name: str, over: str | None = None) -> float:
        """The same over all prompts together."""
        base = self.of(over) if over else self.methods[0]
        return self.of(name).tokens_per_second / base.tokens_per_second

    def table(self) -> Table:
        """A line a method."""
        columns = (
            "method",
            "tokens/s",
            "speed-up",
            "slowest prompt",
            "tokens a target call",
            "accepted",
            "same output",
        )
        return Table(columns, tuple(self._line(method) for method in self.methods))

    def _line(self, method: MethodResult) -> tuple[str, ...]:
        stats, count = method.stats, len(method.new_tokens)
        accepted = f"{stats.acceptance_rate:.0%}" if stats and stats.n_tested else "–"
        same = f"{count - method.unequal - method.rounded} of {count}"
        if method.rounded:
            same += f", {method.rounded} within rounding"
        if method.unequal:
            same += f", {method.unequal} differ"
        return (
            method.name,
            f"{method.tokens_per_second:.3g}",
            f"{self.ratio(method.name):.2f}x",
            f"{min(self.ratios(method.name)):.2f}x",
            f"{stats.tokens_per_target_call:.2f}" if stats else "1.00",
            accepted,
            same,
        )


def compare_methods(
    methods: Mapping[str, Callable[[torch.Tensor], Run]],
    prompts: Sequence[torch.Tensor],
    repeats: int = 3,
    *,
    target: Decoder | LoadedModel | PreTrainedModel,
) -> Comparison:
    """Run each method on each of `prompts (1, n)`, in turns, A B A B, `repeats` times, after one pass to warm up.

    The first method is the reference: speed is a ratio to its, and outputs are compared with its first one. `target`,
    the model that all of them run, says whether rounding explains a difference (`first_difference`). Meant for greedy
    output. Holds the device's lock. Errors: ValueError for arguments.
    """
    _check.require(bool(methods) and all(map(callable, methods.values())), "methods", methods, "functions by name")
    _check.require(bool(len(prompts)), "prompts", prompts, "at least one prompt of shape (1, n)")
    _check.integer("repeats", repeats, 1)
    target = target if isinstance(target, Decoder) else Decoder(target)
    runs: dict[str, list[list[Run]]] = {name: [] for name in methods}
    with device_lock(target.device):
        for method in methods.values():
            method(prompts[0])
        for prompt in prompts:
            turns = [{name: method(prompt) for name, method in methods.items()} for _ in range(repeats)]
            for name in methods:
                runs[name].append([turn[name] for turn in turns])
        reference = [of_prompt[0].tokens for of_prompt in next(iter(runs.values()))]
        return Comparison(tuple(_result(name, runs[name], prompts, reference, target) for name in methods))


def _result(
    name: str, runs: list[list[Run]], prompts: Sequence[torch.Tensor], reference: list[torch.Tensor], target: Decoder
) -> MethodResult:
    first = [of_prompt[0] for of_prompt in runs]
    # Each repeat is compared: one that differs from the others counts.
    worst = []
    for of_prompt, wanted in zip(runs, reference, strict=True):
        other = next((run.tokens for run in of_prompt if not torch.equal(run.tokens, wanted)), wanted)
        worst.append(first_difference(target, wanted, other))
    counted = [run.stats for run in first if run.stats is not None]
    return MethodResult(
        name,
        tuple(run.tokens.shape[1] - prompt.shape[1] for run, prompt in zip(first, prompts, strict=True)),
        tuple(statistics.median(run.seconds for run in of_prompt) for of_prompt in runs),
        sum(counted, SpeculativeStats()) if counted else None,
        tuple(worst),
    )
