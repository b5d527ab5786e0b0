"""A model that runs in milliseconds with texts of its own, and results by hand."""

import dataclasses

import pytest
import torch

from labkit.engine.ladder import RUNGS
from labkit.labs import _stack_compute
from labkit.labs._stack_compute import StackCompute
from labkit.labs._stack_models import Stacks
from labkit.labs._stack_result import Quality, Run, Sizes, StackParams, StackResult, Turn
from labkit.labs._stack_text import Texts
from labkit.models import LoadedModel, tiny_model
from labkit.speculative.stats import SpeculativeStats
from tests.labs.roofline_fixtures import CEILINGS

CPU = torch.device("cpu")
ALL = tuple(RUNGS)
WINDOWS, CONTEXT = 2, 16


def fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns of a few tokens, and the same ceilings wherever the test runs."""
    monkeypatch.setattr(_stack_compute, "measure_ceilings", lambda device, refresh=False: CEILINGS)
    monkeypatch.setattr(_stack_compute, "_BUDGET_S", 0.0)
    monkeypatch.setattr(_stack_compute, "_FIRST_TOKENS", 4)
    monkeypatch.setattr(_stack_compute, "_TURN_TOKENS", 9)


def texts(vocab: int = 256) -> Texts:
    """A prompt that repeats, so that a lookup finds something, a longer one, and two windows."""
    torch.manual_seed(0)
    chat = torch.arange(5, 11).repeat(3)[None]
    return Texts({"chat": chat, "long": torch.randint(0, vocab, (1, 48))}, torch.randint(0, vocab, (WINDOWS, CONTEXT)))


def loaded(name: str = "tiny", **overrides: object) -> LoadedModel:
    """Two layers of 64 hidden units; nothing is tokenized."""
    return LoadedModel(tiny_model(**overrides), None, name)


def computed(model: LoadedModel | None = None) -> StackCompute:
    return StackCompute(Stacks(model or loaded(), CPU, texts()))


def params(*rungs: str, **others: object) -> StackParams:
    return StackParams(rungs, **({"model": "tiny"} | others))


def run(compute: StackCompute, *rungs: str, **others: object) -> list[StackResult]:
    """Every result of one setting, in order."""
    return [s for s in compute(params(*rungs, **others), lambda: False) if isinstance(s, StackResult)]


def first(compute: StackCompute, *rungs: str, **others: object) -> StackResult:
    """What is known of a setting before a clock runs."""
    return next(s for s in compute(params(*rungs, **others), lambda: False) if isinstance(s, StackResult))


BASE = Sizes(400_000_000, 46_080.0, 300_000_000, 480_000_000)


def by_hand(*rungs: str, speedup: float = 2.0, left_out: dict[str, str] | None = None, **others: object) -> StackResult:
    """A result of a baseline of 10 tokens a second, 1,000 times 3 MB/s of bandwidth, everything measured."""
    left_out = left_out or {}
    turn = Turn(Run(0.5, 0.1), Run(0.2, 0.1 / speedup))
    drafts = "speculation" in rungs
    return StackResult(
        params=params(*rungs, *left_out, **others),
        device="cpu",
        dtype="bfloat16",
        on=rungs,
        left_out=left_out,
        prompt_tokens=20,
        baseline_name="transformers.generate, float32, eager attention",
        sizes=Sizes(100_000_000, 25_920.0, 60_000_000, 120_000_000) if rungs else BASE,
        base_sizes=BASE,
        proposer="prompt lookup" if drafts else "",
        threads=2,
        kept=turn.baseline,
        first=turn.stack,
        turns=(turn, dataclasses.replace(turn, baseline=Run(0.5, 0.1))),
        stats=SpeculativeStats(20, 16, 8, 10, 10, 18) if drafts else SpeculativeStats(),
        bandwidth=3e9,
        quality=Quality((11.0, 11.0), (10.0, 10.0), CONTEXT, WINDOWS),
    )
