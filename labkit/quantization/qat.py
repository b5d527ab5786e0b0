"""Quantization-aware training: the codes of a packed weight trained through their own rounding.

Bengio, Leonard and Courville, "Estimating or Propagating Gradients Through Stochastic Neurons", 2013 (the
straight-through estimator); Esser et al., "Learned Step Size Quantization", ICLR 2020; Chen et al., "EfficientQAT",
2024. The float model is the teacher, as in LLM-QAT (Liu et al. 2023).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress as progress_bar
from labkit.quantization import _qat_state
from labkit.quantization._qat_layers import FakeQuantLinear, put
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.linear import QuantLinear
from labkit.quantization.report import MatrixReport, QuantizationReport
from labkit.quantization.rtn import RTNConfig
from labkit.training import Loop, Objective, Teacher, TrainingState

STARTS = ("gptq", "rtn")
TRAINABLE = ("scales", "codes and scales")
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_OF_THE_RUN_ONLY = ("state_path", "save_every", "time_limit_s")


@dataclass(frozen=True)
class QATConfig:
    """What to start from, what to train, and for how long.

    bits, group_size, sym: as in RTNConfig. start: whose codes and grid to begin with, "gptq" (desc_act and damp_percent
    as in GPTQConfig; on the first `start_samples` of the calibration) or "rtn". Zero points and the columns' groups
    stay as they were there, and so does whatever is not quantized: embedding, norms, head.
    trainable: "scales" alone (the last phase of EfficientQAT), which needs no estimator, since the step size is outside
    of the rounding; or "codes and scales", where the codes are trained by the straight-through estimator. That is for
    longer runs: measured on smollm2-135m at 3 bits, thirty steps of 512 tokens change one code in ten thousand at the
    default rate, and gain nothing over the scales alone; at thirty times the rate so many change at once that the
    model is gone (the KL, 0.4 nats, is above 3 after six steps).
    steps of `batch_size` samples each, every sample once before any comes again, in an order that `seed` decides.
    learning_rate: Adam's, in codes a step; scale_learning_rate: for step sizes, as a part of what each began as. Both
    fall to 0 over `steps`. distillation: share of KL to the float model in the loss, from 0 (next-token cross-entropy
    alone) to 1. compute_dtype: of the matrix products in training; what is trained is float32 in both.
    state_path: a file to which the training is saved every `save_every` steps and at its end; where it exists, the
    training goes on from it and ends with the very weights that it would have had. time_limit_s: training stops after
    the step in which it is reached (of this call), and the model is packed as it then stands.
    """

    bits: int = 3
    group_size: int = 64
    sym: bool = False
    start: str = "gptq"
    desc_act: bool = True
    damp_percent: float = 0.01
    start_samples: int = 32
    trainable: str = "scales"
    steps: int = 100
    batch_size: int = 1
    learning_rate: float = 1e-4
    scale_learning_rate: float = 5e-3
    distillation: float = 1.0
    compute_dtype: str = "bfloat16"
    seed: int = 0
    state_path: Path | str | None = None
    save_every: int = 50
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        _check.choice("start", self.start, STARTS)
        self.start_config()
        _check.choice("trainable", self.trainable, TRAINABLE)
        _check.choice("compute_dtype", self.compute_dtype, tuple(COMPUTE_DTYPES))
        for name in ("start_samples", "steps", "batch_size", "save_every"):
            _check.integer(name, getattr(self, name), 1)
        for name in ("learning_rate", "scale_learning_rate"):
            rate = _check.number(name, getattr(self, name), 0.0, 1.0)
            _check.require(rate > 0, name, rate, "a number above 0, up to 1")
        _check.number("distillation", self.distillation, 0.0, 1.0)
        _check.seed("seed", self.seed)
        _check.require(isinstance(self.state_path, Path | str | None), "state_path", self.state_path, "a path or None")
        if self.time_limit_s is not None:
            _check.number("time_limit_s", self.time_limit_s, 0.0)

    def start_config(self) -> GPTQConfig | RTNConfig:
        """The config of the model that training starts from."""
        if self.start == "rtn":
            return RTNConfig(self.bits, self.group_size, self.sym)
        return GPTQConfig(self.bits, self.group_size, self.sym, self.desc_act, self.damp_percent)


@dataclass(frozen=True, repr=False)
class QATReport(QuantizationReport):
    """A QuantizationReport (whose matrices have no error: training lowers the loss, not each output's) with the loss of
    each step, in nats; `training_seconds`, over all calls that went into it; the report of the `start`, None where a
    saved training went on; and whether a time limit stopped it before its last step."""

    losses: tuple[float, ...] = ()
    training_seconds: float = 0.0
    start: QuantizationReport | None = None
    stopped: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """The step of each loss, from 1."""
        return tuple(range(1, len(self.losses) + 1))


class QATRun:
    """One training, its arguments known to be right. `linears`: the float matrices to be quantized, by full name.

    Errors: ValueError for a state file that is another training's.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        linears: Mapping[str, nn.Linear],
        config: QATConfig,
        ids: torch.Tensor,
        bits_per_module: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.linears, self.config, self.ids = model, dict(linears), config, ids.to(model.device)
        self.dtype = COMPUTE_DTYPES[config.compute_dtype]
        self._path = None if config.state_path is None else Path(config.state_path)
        fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in _OF_THE_RUN_ONLY}
        self._identity = {"model_and_text": _qat_state.fingerprint(self.linears, ids), **fields}
        self._identity["bits_per_module"] = dict(bits_per_module or {})
        self._saved = _qat_state.load(self._path, self._identity)

    def all(
        self,
        start: Callable[[torch.Tensor | None], QuantizationReport],
        progress: bool,
        watch: Callable[[int], None] = lambda _: None,
    ) -> QATReport:
        """Start, train and pack, in place; on any error the model is as it was.

        `start(samples)` quantizes the model, calibrating on those samples, if any; `watch(step)` is called at step 0
        and after each step.
        """
        begin = time.perf_counter()
        training, flags = self.model.training, [(p, p.requires_grad) for p in self.model.parameters()]
        try:
            self.model.eval().requires_grad_(False)
            report = None if self._saved else self._begin(start)
            fake_quant = self._fake_quant()
            put(self.model, fake_quant)
            state = self._train(fake_quant, progress, watch)
            packed = {name: self._packed(name, layer) for name, layer in fake_quant.items()}
            put(self.model, packed)
        except BaseException:
            put(self.model, self.linears)
            raise
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            self.model.train(training)
        return self._report(packed, state, report, time.perf_counter() - begin)

    def _begin(self, start: Callable[[torch.Tensor | None], QuantizationReport]) -> QuantizationReport:
        return start(self.ids[: self.config.start_samples] if self.config.start == "gptq" else None)

    def _fake_quant(self) -> dict[str, FakeQuantLinear]:
        """What takes each matrix's place while it is trained, beginning with the start's codes."""
        fake_quant = {}
        for name, linear in self.linears.items():
            saved = self._saved and self._saved.start(name).map(lambda t: t.to(self.model.device))
            fake_quant[name] = FakeQuantLinear(linear, saved or self.model.get_submodule(name).portable(), self.dtype)
            fake_quant[name].latent.requires_grad_(self.config.trainable != "scales")
        return fake_quant

    def _train(
        self, fake_quant: Mapping[str, FakeQuantLinear], progress: bool, watch: Callable[[int], None]
    ) -> TrainingState:
        config = self.config
        state = self._saved.state if self._saved else TrainingState()

        def save(state: TrainingState) -> None:
            if self._path is not None:
                _qat_state.save(self._path, fake_quant, optimizer, state, self._identity)

        groups = [
            ([layer.latent for layer in fake_quant.values() if layer.latent.requires_grad], config.learning_rate),
            ([layer.relative for layer in fake_quant.values()], config.scale_learning_rate),
        ]
        loop = Loop(
            groups,
            self.ids,
            config.steps,
            config.batch_size,
            config.seed,
            config.time_limit_s,
            config.save_every,
            save,
            watch,
        )
        optimizer = loop.optimizer()
        if self._saved:
            self._saved.restore(fake_quant, optimizer)
        teacher = Teacher(self.model, lambda on: _teach(fake_quant, on), self.dtype)
        objective = Objective(self.model, config.distillation, teacher, self.dtype)
        label = f"QAT, {self.model.config.model_type}"
        bar = progress_bar(label, config.steps, "steps") if progress else contextlib.nullcontext(lambda _: None)
        with torch.enable_grad(), bar as update:
            loop.run(objective, optimizer, state, update)
        return state

    def _packed(self, name: str, layer: FakeQuantLinear) -> QuantLinear:
        linear = self.linears[name]
        return QuantLinear(layer.packed(), linear.bias, dtype=linear.weight.dtype)

    def _report(
        self,
        packed: Mapping[str, QuantLinear],
        state: TrainingState,
        start: QuantizationReport | None,
        seconds: float,
    ) -> QATReport:
        stopped = state.step < self.config.steps
        notes = (f"stopped by its time limit at step {state.step} of {self.config.steps}",) if stopped else ()
        return QATReport(
            self.config,
            tuple(MatrixReport.of(name, module.weight.bits, module) for name, module in packed.items()),
            notes,
            seconds,
            losses=tuple(state.losses),
            training_seconds=state.seconds,
            start=start,
            stopped=stopped,
        )


def _teach(fake_quant: Mapping[str, FakeQuantLinear], on: bool) -> None:
    """Have the float matrices answer, or the rounded ones again."""
    for layer in fake_quant.values():
        layer.teaching = on
