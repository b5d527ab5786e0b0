"""Healing: a short training after heads were merged, towards what the model said before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import progress as progress_bar
from labkit.attention.merging import check_ids
from labkit.models import LoadedModel, plain_model
from labkit.training import Loop, Objective, Teacher, TrainingState

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TRAINABLE = {"attention": _ATTENTION, "layers": (*_ATTENTION, "gate_proj", "up_proj", "down_proj")}


@dataclass(frozen=True)
class HealReport:
    """The loss of each step, in nats a token; the seconds they took; whether the time limit came before the last."""

    losses: tuple[float, ...]
    seconds: float
    stopped: bool


def heal(
    model: PreTrainedModel | LoadedModel,
    calibration: Tensor,
    *,
    teacher: PreTrainedModel | LoadedModel | None = None,
    steps: int = 100,
    learning_rate: float = 1e-4,
    batch_size: int = 1,
    trainable: str = "layers",
    compute_dtype: str = "float32",
    time_limit_s: float | None = None,
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
    progress: bool = True,
) -> HealReport:
    """Train a merged model in place on token ids `calibration (n_samples, seq_len)`.

    teacher: the original; the loss is then KL(teacher || model), the mean over tokens (Hinton, Vinyals and Dean 2015),
    so that what is learned is the original and not the text. None: cross-entropy of the next token, which also teaches
    the text. steps of `batch_size` samples by Adam; the rate falls to 0 over them. trainable: the matrices of
    "attention" alone or of all "layers". compute_dtype: of the products; weights are float32. time_limit_s: training
    stops after the step in which it is reached. watch(step): called before the first step and after each, unclocked.

    The trained matrices get storage of their own first, so a model that shares it, such as the teacher, stays.
    Errors: ValueError for a model that is quantized or not in float32; FloatingPointError for a loss that is no number.
    """
    student, taught_by = _plain("model", model), None if teacher is None else _plain("teacher", teacher)
    takes = "another model than the one that is trained"
    _check.require(taught_by is not student, "teacher", "the model itself", takes)
    ids = check_ids(student, calibration)
    for name, count in (("steps", steps), ("batch_size", batch_size)):
        _check.integer(name, count, 1)
    rate = _check.number("learning_rate", learning_rate, 0.0, 1.0)
    _check.choice("trainable", trainable, tuple(TRAINABLE))
    dtype = COMPUTE_DTYPES[_check.choice("compute_dtype", compute_dtype, tuple(COMPUTE_DTYPES))]
    if time_limit_s is not None:
        _check.number("time_limit_s", time_limit_s, 0.0)
    parameters = _trained(student, TRAINABLE[trainable])
    loop = Loop(
        [(parameters, rate)],
        ids.to(student.device),
        steps,
        batch_size,
        _check.seed("seed", seed),
        time_limit_s=time_limit_s,
        watch=watch or (lambda _: None),
    )
    guide = None if taught_by is None else Teacher(taught_by, lambda _: None, dtype)
    objective = Objective(student, 0.0 if guide is None else 1.0, guide, dtype)
    return _run(student, parameters, loop, objective, progress)


def _run(
    model: PreTrainedModel, parameters: list[nn.Parameter], loop: Loop, objective: Objective, progress: bool
) -> HealReport:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.data = parameter.data.clone()
        parameter.requires_grad_(True)
    state = TrainingState()
    bar = progress_bar("healing", loop.steps, "steps") if progress else contextlib.nullcontext(lambda _: None)
    try:
        with bar as update:
            loop.run(objective, loop.optimizer(), state, update)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
            parameter.grad = None
    return HealReport(tuple(state.losses), state.seconds, state.step < loop.steps)


def _plain(name: str, model: object) -> PreTrainedModel:
    model = plain_model(model)
    ok = isinstance(model, PreTrainedModel) and hasattr(model, "lm_head")
    _check.require(ok, name, type(model).__name__, "a causal LM of transformers")
    return model


def _trained(model: PreTrainedModel, names: tuple[str, ...]) -> list[nn.Parameter]:
    """The matrices of every layer that bear one of the names."""
    modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] in names]
    plain = bool(modules) and all(type(module) is nn.Linear for module in modules)
    _check.require(plain, "model", "quantized or replaced matrices", "plain matrices in float32")
    dtypes = {str(module.weight.dtype) for module in modules}
    takes = "weights in float32: a step of Adam is lost in 16 bits"
    _check.require(dtypes == {"torch.float32"}, "model", ", ".join(sorted(dtypes)), takes)
    return [module.weight for module in modules]
