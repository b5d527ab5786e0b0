"""A sampling lab's compute over a target that runs in milliseconds, and results by hand."""

import torch
from transformers import PreTrainedModel

from labkit.labs._sampling_compute import SamplingCompute
from labkit.labs._sampling_result import Likely, NextToken, SampledText, SamplingParams, SamplingResult
from labkit.labs._speculative_models import Targets
from labkit.models import LoadedModel
from labkit.speculative.interface import Proposal
from labkit.speculative.stats import SpeculativeStats
from tests.labs.speculative_fixtures import CPU, loaded

PROMPTS = ("Why <b>?", "xyz")
NEW = 13


def params(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, **others: object) -> SamplingParams:
    fixed = {"proposer": "int4 copy", "weights": "float32", "max_new_tokens": NEW, "model": "tiny"}
    return SamplingParams(temperature, top_k, top_p, **(fixed | others))


def computed(model: LoadedModel | None = None, proposer: object | None = None) -> SamplingCompute:
    """With a proposer, that one drafts whatever is asked for."""
    make = None if proposer is None else lambda params: proposer
    return SamplingCompute(Targets(model or loaded(), CPU), PROMPTS, make=make)


def run(compute: SamplingCompute, *args: object, **others: object) -> list[SamplingResult]:
    """Every result of one setting, in order."""
    return [s for s in compute(params(*args, **others), lambda: False) if isinstance(s, SamplingResult)]


class Even:
    """Drafts from a q that gives every token the same; keeps the rows that it drafted after."""

    wants_hidden = False

    def __init__(self, vocab: int = 256) -> None:
        self._vocab, self.rows = vocab, []

    def begin(self, target: object, input_ids: object, sampling: object, generator: torch.Generator) -> None:
        self._generator = generator
        self.rows.append([])

    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        self.rows[-1].append((len(rows[0]), n))
        tokens = torch.randint(self._vocab, (1, n), generator=self._generator)
        return Proposal(tokens, torch.full((1, n, self._vocab), 1 / self._vocab))

    def observe(self, *_: object) -> None:
        raise AssertionError("it wants no hidden states")


@torch.no_grad()
def distributions(model: PreTrainedModel, ids: list[int], temperature: float) -> torch.Tensor:
    """What `transformers` says after each of these tokens, `(n, vocab)`: softmax(logits / temperature)."""
    return torch.softmax(model(torch.tensor([ids])).logits[0].double() / temperature, -1)


def by_hand(temperature: float = 1.0, alpha: float = 0.6, expected: float = 0.7, **others: object) -> SamplingResult:
    """A result with ten tested tokens a text, of which this share was accepted; the texts differ."""
    said = NextToken(
        (Likely(" the", 0.5, 0.6, 0.75), Likely("<i>", 0.2, 0.2, 0.25), Likely("\n", 0.1, 0.15, 0.0, "top_p")),
        Likely("", 0.2, 0.05, 0.0),
        1000,
        2,
        0.81,
        2.5,
        0.05,
        0.15,
    )
    counts = SpeculativeStats(12, 10, round(10 * alpha), 5, 5, 13)
    texts = tuple(
        SampledText(seed, (7, 8 + seed), (" <b>", f"x{seed}\n"), (True, False), (expected,) * 10, counts)
        for seed in range(3)
    )
    setting = params(temperature, **others)
    return SamplingResult(setting, "cpu", "float32", "Why <b>?", 8, said, texts, 2)
