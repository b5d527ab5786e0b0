"""What quantization-aware training wins back, and whether it is the rounding that it mends.

Tuning on text like the text that is measured lowers perplexity by itself. So the float model gets the same tuning, and
the distance to the untouched float model is measured on text of another kind too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._paths import DATA
from labkit._progress import progress as progress_bar
from labkit.corpora import load_text, token_batches
from labkit.models import LoadedModel, load_model
from labkit.quantization._qat_evaluator import Evaluator
from labkit.quantization._qat_training import Loop, Objective, TrainingState
from labkit.quantization.api import quantize_
from labkit.quantization.plan import plan
from labkit.quantization.qat import COMPUTE_DTYPES, QATConfig, QATReport, QATRun

RECORDED = DATA / "recorded" / "qat_3bit.json"


@dataclass(frozen=True)
class Point:
    """After `step` steps and `seconds` of training: the perplexity on the evaluation windows, and the loss of that
    step, None before the first."""

    step: int
    loss: float | None
    perplexity: float
    seconds: float


@dataclass(frozen=True)
class Control:
    """The float model's own matrices, trained by next-token cross-entropy on the same batches in as many steps."""

    learning_rate: float
    perplexity_before: float
    perplexity_after: float
    losses: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class QATStudy:
    """One comparison. Perplexities are in float32 over the same windows; `points` begin with the quantized model that
    training starts from, and `perplexity` is that of the packed model in the end. kl_before, kl_after: mean
    KL(float model || quantized model) in nats a token by name of the text, at the start and of the packed model. Each
    name is a corpus, of which its "eval" part was used. `provenance`: machine, versions, date and commit, of a run that
    was recorded."""

    model: str
    config: Mapping[str, object]
    n_samples: int
    seq_len: int
    eval_windows: int
    baseline: float
    points: tuple[Point, ...]
    perplexity: float
    losses: tuple[float, ...]
    seconds: float
    bits_per_weight: float
    control: Control
    kl_before: Mapping[str, float]
    kl_after: Mapping[str, float]
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def recovered(self) -> float:
        """The share of the start's excess perplexity over the float model that training won back."""
        start = self.points[0].perplexity
        return (start - self.perplexity) / (start - self.baseline)

    def save(self, path: Path, **provenance: str) -> None:
        """Write it as JSON, with where it was measured."""
        kept = dataclasses.replace(self, provenance=provenance)
        path.write_text(json.dumps(dataclasses.asdict(kept), indent=1) + "\n", encoding="utf-8")


@functools.cache
def recorded_study(path: Path = RECORDED) -> QATStudy:
    """The recorded run. Errors: OSError where there is no such file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found["points"] = tuple(Point(**point) for point in found["points"])
    control = found["control"]
    found["control"] = Control(**(control | {"losses": tuple(control["losses"])}))
    return QATStudy(**(found | {"losses": tuple(found["losses"])}))


def float_control(
    model: PreTrainedModel,
    linears: Mapping[str, nn.Linear],
    config: QATConfig,
    ids: torch.Tensor,
    learning_rate: float,
    progress: bool = True,
) -> TrainingState:
    """Train the float matrices in place as QAT trains packed ones: same batches, steps, schedule and arithmetic.

    The loss is cross-entropy, since a model is no teacher of itself. `learning_rate` is Adam's, in weights.
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


def _train(
    loaded: LoadedModel, config: QATConfig, ids: torch.Tensor, evaluator: Evaluator, n_points: int, progress: bool
) -> tuple[QATReport, tuple[Point, ...], dict[str, float]]:
    """QAT in place, watched: the report, the curve, and how far off the start was."""
    model, before = loaded.model, {}
    at = {round(config.steps * i / max(1, n_points - 1)) for i in range(n_points)} | {0}
    seen: dict[int, tuple[float, float]] = {}
    clock = {"begin": 0.0, "apart": 0.0}

    def watch(step: int) -> None:
        begin = time.perf_counter()
        if not step:
            clock.update(begin=begin)
            before.update(evaluator.divergence(model))
        if step in at:
            trained = begin - clock["begin"] - clock["apart"]
            seen[step] = (evaluator.perplexity(model), trained)
        clock["apart"] += time.perf_counter() - begin

    run = QATRun(model, plan(model, ("lm_head",)).linears, config, ids)
    start = functools.partial(quantize_, model, config.start_config(), progress=progress)
    report = run.all(start, progress, watch)
    points = [
        Point(step, report.losses[step - 1] if step else None, value, seconds)
        for step, (value, seconds) in seen.items()
    ]
    return report, tuple(points), before


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
    progress: bool = True,
) -> QATStudy:
    """Quantize a model with training and hold it against its start, the float model, and the float model tuned alike.

    Loads the model twice, in float32, one after the other. Trains on `n_samples` windows of "pydoc"; perplexity is over
    `eval_windows` of its other part, the distance over those and `other_windows` of "python-source".
    Takes minutes: `recorded_study()` is what it once gave. Errors: those of `load_model`, `quantize_` and training.
    """
    config = QATConfig() if config is None else config
    # A training that goes on from a file never sees its own start again.
    _check.require(config.state_path is None, "config.state_path", str(config.state_path), "None")
    loaded = load_model(name, dtype=torch.float32)
    ids = token_batches(loaded.tokenizer, load_text("pydoc", "calibration"), n_samples, seq_len, 0)
    evaluator = Evaluator(loaded, {"pydoc": eval_windows, "python-source": other_windows}, seq_len)
    baseline = evaluator.perplexity(loaded.model)
    report, points, before = _train(loaded, config, ids, evaluator, n_points, progress)
    after, value = evaluator.divergence(loaded.model), evaluator.perplexity(loaded.model)
    del loaded
    gc.collect()
    model = load_model(name, dtype=torch.float32).model
    state = float_control(model, plan(model, ("lm_head",)).linears, config, ids, control_learning_rate, progress)
    return QATStudy(
        model=name,
        config=json.loads(json.dumps(dataclasses.asdict(config), default=str)),
        n_samples=n_samples,
        seq_len=seq_len,
        eval_windows=eval_windows,
        baseline=baseline,
        points=points,
        perplexity=value,
        losses=report.losses,
        seconds=report.training_seconds,
        bits_per_weight=report.bits_per_weight,
        control=Control(
            control_learning_rate, baseline, evaluator.perplexity(model), tuple(state.losses), state.seconds
        ),
        kl_before=before,
        kl_after=after,
    )
