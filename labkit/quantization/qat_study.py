"""What quantization-aware training wins back, and whether it is the rounding that it mends.

Tuning on text like the text that is measured lowers perplexity by itself. So the float model is tuned on the same
batches too, and the distance to the untouched float model is measured on text of another kind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress as progress_bar
from labkit.corpora import load_text, token_batches
from labkit.models import load_model
from labkit.quantization._qat_evaluator import Evaluator
from labkit.quantization._qat_layers import put
from labkit.quantization._qat_record import RECORDED, Control, Point, QATStudy, Variant, recorded_study
from labkit.quantization.api import quantize_
from labkit.quantization.plan import plan
from labkit.quantization.qat import COMPUTE_DTYPES, QATConfig, QATReport, QATRun
from labkit.quantization.report import QuantizationReport
from labkit.training import Loop, Objective, TrainingState

__all__ = [
    "RECORDED",
    "VARIANTS",
    "Control",
    "Point",
    "QATStudy",
    "Variant",
    "float_control",
    "qat_study",
    "recorded_study",
]

# What is recorded beside the default: the straight-through estimator, and the default without its teacher.
VARIANTS: Mapping[str, Mapping[str, object]] = {
    "codes and scales": {"trainable": "codes and scales"},
    "next-token loss": {"distillation": 0.0},
}
# Whatever else differs would be another start.
_MAY_VARY = frozenset(("trainable", "distillation", "learning_rate", "scale_learning_rate"))


def float_control(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Linear],
    config: QATConfig,
    ids: torch.Tensor,
    learning_rate: float,
    progress: bool = True,
) -> TrainingState:
    """Tune all weights of the float matrices in place by next-token cross-entropy, on the batches that QAT has.

    As many steps, the same schedule and arithmetic; another loss, since a model is no teacher of itself, and more to
    train than QAT's step sizes. `learning_rate` is Adam's, in weights.
    """
    groups = [([linear.weight for linear in linears.values()], learning_rate)]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for linear in linears.values():
        linear.weight.requires_grad_(True)
    state = TrainingState()
    bar = progress_bar("float control", config.steps, "steps") if progress else contextlib.nullcontext(lambda _: None)
    loop = Loop(groups, ids.to(model.device), config.steps, config.batch_size, config.seed)
    try:
        with bar as update:
            loop.run(Objective(model, 0.0, None, COMPUTE_DTYPES[config.compute_dtype]), loop.optimizer(), state, update)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    return state


@dataclass(frozen=True)
class _Student:
    """One training: its report, its curve, how far it was from the float model before and after, as in QATStudy."""

    report: QATReport
    points: tuple[Point, ...]
    perplexity: float
    code_changes: float
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def outcome(self) -> dict[str, object]:
        """The fields that QATStudy and Variant share."""
        return {
            "points": self.points,
            "perplexity": self.perplexity,
            "losses": self.report.losses,
            "seconds": self.report.training_seconds,
            "code_changes": self.code_changes,
            "kl_after": self.after,
        }


class _Watch:
    """Perplexity at some steps, and the distance to the float model at the first; on a clock of its own."""

    def __init__(self, model: PreTrainedModel, evaluator: Evaluator, steps: int, n_points: int) -> None:
        self._model, self._evaluator = model, evaluator
        self._at = {round(steps * i / max(1, n_points - 1)) for i in range(n_points)} | {0}
        self._begin = self._apart = 0.0
        self._seen: dict[int, tuple[float, float]] = {}
        self.before: dict[str, float] = {}

    def __call__(self, step: int) -> None:
        begin = time.perf_counter()
        if not step:
            self._begin = begin
            self.before = self._evaluator.divergence(self._model)
        if step in self._at:
            self._seen[step] = (self._evaluator.perplexity(self._model), begin - self._begin - self._apart)
        self._apart += time.perf_counter() - begin

    def points(self, losses: tuple[float, ...]) -> tuple[Point, ...]:
        return tuple(
            Point(step, losses[step - 1] if step else None, value, seconds)
            for step, (value, seconds) in self._seen.items()
        )


class _Trainings:
    """Trainings of one model, that all begin with the same quantized matrices."""

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, evaluator: Evaluator, n_points: int, progress: bool):
        self.model, self.ids, self.evaluator = model, ids, evaluator
        self.n_points, self.progress = n_points, progress
        self.linears = plan(model, ("lm_head",)).linears
        self._begun: dict[str, nn.Module] = {}
        self._report: QuantizationReport | None = None

    def _start(self, config: QATConfig, samples: torch.Tensor | None) -> QuantizationReport:
        """Quantize once; from then on put the same matrices back."""
        if self._report is None:
            self._report = quantize_(self.model, config.start_config(), samples, progress=self.progress)
            self._begun = {name: self.model.get_submodule(name) for name in self.linears}
        put(self.model, self._begun)
        return self._report

    def train(self, config: QATConfig) -> _Student:
        """Train, evaluate, and put the float matrices back."""
        watch = _Watch(self.model, self.evaluator, config.steps, self.n_points)
        run = QATRun(self.model, self.linears, config, self.ids)
        report = run.all(functools.partial(self._start, config), self.progress, watch)
        after, value = self.evaluator.divergence(self.model), self.evaluator.perplexity(self.model)
        changes = self._code_changes()
        put(self.model, self.linears)
        return _Student(report, watch.points(report.losses), value, changes, watch.before, after)

    def variant(self, config: QATConfig, changes: Mapping[str, object]) -> Variant:
        """One that differs from `config` by `changes`."""
        return Variant(dict(changes), **self.train(dataclasses.replace(config, **changes)).outcome)

    def control(self, config: QATConfig, baseline: float, learning_rate: float) -> Control:
        """The last: it trains the float matrices themselves."""
        state = float_control(self.model, self.linears, config, self.ids, learning_rate, self.progress)
        after = self.evaluator.perplexity(self.model)
        return Control(learning_rate, baseline, after, tuple(state.losses), state.seconds)

    def _code_changes(self) -> float:
        changed = total = 0
        for name, begun in self._begun.items():
            before, after = begun.portable().codes(), self.model.get_submodule(name).portable().codes()
            changed += int((before != after).sum())
            total += before.numel()
        return changed / total


def qat_study(
    name: str = "smollm2-135m",
    config: QATConfig | None = None,
    *,
    n_samples: int = 192,
    seq_len: int = 512,
    eval_windows: int = 6,
    other_windows: int = 4,
    n_points: int = 5,
    control_learning_rate: float = 1e-4,
    variants: Mapping[str, Mapping[str, object]] | None = None,
    progress: bool = True,
) -> QATStudy:
    """Quantize a model with training, and hold it against its start, the float model, and the float model tuned.

    Loads the model in float32. Trains on `n_samples` windows of "pydoc"; perplexity is over `eval_windows` of its other
    part, the distance over those and `other_windows` of "python-source". `variants`: other trainings by name, as fields
    of the config to change; `VARIANTS` are those that are recorded.
    Takes minutes: `recorded_study()` is what it once gave. Errors: those of `quantize_`, ValueError for a bad variant.
    """
    config, variants = _checked(config or QATConfig(), variants or {})
    loaded = load_model(name, dtype=torch.float32)
    ids = token_batches(loaded.tokenizer, load_text("pydoc", "calibration"), n_samples, seq_len, 0)
    evaluator = Evaluator(loaded, {"pydoc": eval_windows, "python-source": other_windows}, seq_len)
    baseline = evaluator.perplexity(loaded.model)
    trainings = _Trainings(loaded.model, ids, evaluator, n_points, progress)
    main = trainings.train(config)
    return QATStudy(
        model=name,
        config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        n_samples=n_samples,
        seq_len=seq_len,
        eval_windows=eval_windows,
        baseline=baseline,
        bits_per_weight=main.report.bits_per_weight,
        variants={label: trainings.variant(config, changes) for label, changes in variants.items()},
        control=trainings.control(config, baseline, control_learning_rate),
        kl_before=main.before,
        **main.outcome,
    )


def _checked(
    config: QATConfig, variants: Mapping[str, Mapping[str, object]]
) -> tuple[QATConfig, Mapping[str, Mapping[str, object]]]:
    # A training that goes on from a file never sees its own start again.
    _check.require(config.state_path is None, "config.state_path", str(config.state_path), "None")
    for label, changes in variants.items():
        other = sorted(set(changes) - _MAY_VARY)
        _check.require(not other, f"variants[{label!r}]", ", ".join(other), ", ".join(sorted(_MAY_VARY)))
    return config, variants
