"""The distribution of the next token, by hand and by properties."""

import math

import pytest
import torch

from labkit.labs._sampling_steps import SHOWN, entropy_bits, next_token
from labkit.speculative.interface import Sampling

# Halves, in no order: 1/2, 1/4, 1/8, 1/16, 1/16.
LOGITS = torch.tensor([0.25, 0.0625, 0.5, 0.125, 0.0625]).log()
MANY = 3 * torch.randn(500, generator=torch.Generator().manual_seed(3))


def said(logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0):
    return next_token(logits, Sampling(temperature, top_k, top_p), str)


def drawn(found) -> list[tuple[str, float]]:
    return [(one.text, one.drawn) for one in found.likeliest]


def test_the_model_s_own_distribution_by_hand():
    found = said(LOGITS, 1.0)
    assert [one.text for one in found.likeliest] == ["2", "0", "3", "1", "4"], "of equal ones the first"
    assert [one.own for one in found.likeliest] == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16])
    assert found.bits == pytest.approx(1.875) and found.own_bits == pytest.approx(1.875)
    assert (found.kept, found.mass_cut, found.vocab_size) == (5, 0.0, 5) and found.others.own == 0.0
    assert {one.cut for one in found.likeliest} == {""}


def test_temperature_a_half_squares_the_odds_and_two_takes_their_root():
    cold, hot = said(LOGITS, 0.5), said(LOGITS, 2.0)
    assert cold.likeliest[0].drawn / cold.likeliest[1].drawn == pytest.approx(4)
    assert hot.likeliest[0].drawn / hot.likeliest[1].drawn == pytest.approx(math.sqrt(2))
    assert cold.bits < 1.875 < hot.bits and cold.own_bits == hot.own_bits == pytest.approx(1.875)


def test_top_k_and_top_p_by_hand():
    two = said(LOGITS, 1.0, top_k=2)
    assert drawn(two)[:3] == [("2", pytest.approx(2 / 3)), ("0", pytest.approx(1 / 3)), ("3", 0.0)]
    assert two.kept == 2 and two.cut_by_top_k == pytest.approx(1 / 4) and two.cut_by_top_p == 0
    assert [one.cut for one in two.likeliest] == ["", "", "top_k", "top_k", "top_k"]
    # 1/2 does not reach 0.6, 3/4 does.
    most = said(LOGITS, 1.0, top_p=0.6)
    assert drawn(most) == drawn(two) and most.cut_by_top_p == pytest.approx(1 / 4) and most.cut_by_top_k == 0
    # Among three the first has 4/7, which reaches 0.55; alone it has 1/2, which does not.
    both = said(LOGITS, 1.0, top_k=3, top_p=0.55)
    assert both.kept == 1 and [one.cut for one in both.likeliest] == ["", "top_p", "top_p", "top_k", "top_k"]
    assert (both.cut_by_top_k, both.cut_by_top_p) == (pytest.approx(1 / 8), pytest.approx(3 / 8))
    assert both.mass_cut == pytest.approx(1 / 2) and both.bits == 0.0


def test_temperature_0_leaves_one_and_cuts_nothing():
    found = said(LOGITS, 0.0, top_k=3, top_p=0.5)
    assert drawn(found)[0] == ("2", 1.0) and found.kept == 1 and found.bits == 0.0 and found.mass_cut == 0.0
    assert [one.cut for one in found.likeliest] == ["", *["temperature"] * 4]
    assert drawn(said(LOGITS, 1.7, top_k=1)) == drawn(found)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_smaller_top_p_never_keeps_more_and_cuts_at_most_the_rest(temperature):
    found = [said(MANY, temperature, top_p=p) for p in (1.0, 0.95, 0.7, 0.4, 0.1)]
    assert [one.kept for one in found] == sorted((one.kept for one in found), reverse=True)
    assert [one.bits for one in found] == sorted((one.bits for one in found), reverse=True)
    for one, p in zip(found, (1.0, 0.95, 0.7, 0.4, 0.1), strict=True):
        assert 0 <= one.mass_cut <= 1 - p + 1e-5
    assert found[0].kept > found[-1].kept


@pytest.mark.parametrize("top_k", [1, 2, 5, 100, 5000])
def test_top_k_keeps_k_or_all_there_are(top_k):
    found = said(MANY, 1.0, top_k=top_k)
    assert found.kept == min(top_k, 500) and found.bits <= math.log2(found.kept) + 1e-6


@pytest.mark.parametrize("setting", [(0.0,), (0.7, 50, 0.9), (1.0,), (2.0, 3)])
def test_each_of_the_three_distributions_adds_up_to_1(setting):
    found = said(MANY, *setting)
    assert len(found.likeliest) == SHOWN and len({one.text for one in found.likeliest}) == SHOWN
    for name in ("own", "uncut", "drawn"):
        parts = [getattr(one, name) for one in found.likeliest]
        assert sum(parts) + getattr(found.others, name) == pytest.approx(1.0, abs=1e-5)
        assert parts == sorted(parts, reverse=True)


def test_entropy_of_even_and_of_certain():
    assert entropy_bits(torch.full((64,), 1 / 64)) == pytest.approx(6.0)
    assert str(entropy_bits(torch.tensor([0.0, 1.0]))) == "0.0", "not -0"
