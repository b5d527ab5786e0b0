"""Attention mass against a softmax written out, pooling and choice against loops."""

import pytest
import torch

from labkit.kv_cache import scores
from labkit.kv_cache.scores import attention_mass, heaviest, pooled


@pytest.mark.parametrize("q_len", [1, 4, 11])
@pytest.mark.parametrize("at_once", [1 << 24, 1])
def test_mass_is_what_each_key_gets_of_all_queries(q_len, at_once, monkeypatch):
    monkeypatch.setattr(scores, "_SCORES_AT_ONCE", at_once)
    query, keys = torch.randn(2, 6, q_len, 8), torch.randn(2, 3, 11, 8)
    expected = torch.zeros(2, 3, 11)
    for row in range(2):
        for head in range(6):
            for i in range(q_len):
                seen = 11 - q_len + i + 1
                weights = (keys[row, head // 2, :seen] @ query[row, head, i] * 0.3).softmax(0)
                expected[row, head // 2, :seen] += weights
    found = attention_mass(query, keys, 0.3)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(found.sum(-1), torch.full((2, 3), 2.0 * q_len), atol=1e-4)


def test_pooling_is_of_the_neighbours_that_there_are():
    scores = torch.tensor([[[3.0, 0.0, 0.0, 9.0]]])
    assert pooled(scores, 3, "avg").tolist() == [[[1.5, 1.0, 3.0, 4.5]]]
    assert pooled(scores, 3, "max").tolist() == [[[3.0, 3.0, 9.0, 9.0]]]
    for pooling in ("avg", "max"):
        assert torch.equal(pooled(scores, 1, pooling), scores)


def test_the_heaviest_are_chosen_a_head_and_stay_in_order():
    weights = torch.tensor([[[5.0, 1.0, 4.0, 2.0, 0.0], [0.0, 9.0, 1.0, 8.0, 7.0]]])
    assert heaviest(weights, 3, 1).tolist() == [[[0, 2, 4], [1, 3, 4]]]
    assert heaviest(weights, 3, 0).tolist() == [[[0, 2, 3], [1, 3, 4]]]
    assert heaviest(weights, 2, 2).tolist() == [[[3, 4], [3, 4]]]
    assert heaviest(weights, 5, 2).tolist() == [[[0, 1, 2, 3, 4]] * 2]
