"""Sampling against its definition, and against `transformers`' own warpers."""

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from labkit.engine.sampling import check_sampling, probabilities, sample


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 999])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(4, 50)
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1 else logits
    expected = TopKLogitsWarper(top_k)(None, expected) if top_k else expected
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    torch.testing.assert_close(probabilities(logits, temperature, top_k, top_p), expected.softmax(-1))


@pytest.mark.parametrize(("temperature", "top_p"), [(1e-38, 1.0), (1e-300, 1.0), (1.0, 1e-300), (1e-45, 1e-45)])
def test_next_to_nothing_is_greedy(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[1.0, -torch.inf, 5.0, 2.0]])
    assert probabilities(logits, temperature, 0, top_p).tolist() == [[0, 0, 1, 0]]


def test_greedy_is_all_on_the_first_maximum() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    assert probabilities(logits, 0.0).tolist() == [[0, 1, 0, 0]]
    assert sample(logits, 0.0, 0, 1.0, None).tolist() == [1]


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 99])
def test_of_logits_that_tie_top_k_keeps_the_first(top_k: int) -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 5.0, 2.0, 5.0], [0.0] * 6], dtype=torch.bfloat16)
    order = torch.tensor([[1, 3, 5, 2, 4, 0], [0, 1, 2, 3, 4, 5]])
    kept = torch.zeros(2, 6, dtype=torch.bool).scatter(-1, order[:, :top_k], True)
    assert ((probabilities(logits, 1.5, top_k) > 0) == kept).all()
    if top_k == 1:
        assert (probabilities(logits, 1.5, 1) == probabilities(logits, 0.0)).all()


@pytest.mark.parametrize(
    ("logits", "temperature", "kept"), [([20, 1e-9, 2e-9, 1.5e-9], 1.0, [0, 2]), ([4.9, 5.0], 1e39, [1])]
)
def test_top_k_is_of_the_logits_as_they_are(logits: list[float], temperature: float, kept: list[int]) -> None:
    found = probabilities(torch.tensor([logits]), temperature, len(kept))
    assert set(found[0].nonzero().flatten().tolist()) <= set(kept) and found[0, kept[0]] > 0


def test_samples_follow_the_distribution() -> None:
    logits = torch.randn(10)
    expected = probabilities(logits, 0.8, 6, 0.9)
    draws = sample(logits.expand(20_000, 10), 0.8, 6, 0.9, torch.Generator().manual_seed(3))
    seen = torch.bincount(draws, minlength=10) / 20_000
    assert (seen - expected).abs().sum() / 2 < 0.015  # total variation; its mean here is 0.006
    assert seen[expected == 0].sum() == 0


@pytest.mark.parametrize(
    ("arguments", "named"), [((-1, 0, 1), "temperature"), ((1, -1, 1), "top_k"), ((1, 0, 0), "top_p")]
)
def test_refusals(arguments: tuple, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        check_sampling(*arguments)
