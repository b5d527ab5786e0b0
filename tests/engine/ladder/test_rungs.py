"""Which rungs go on what, and the reason where they do not."""

import pytest
import torch

from labkit.engine.ladder import RUNGS, refusals

CPU = {"device": "cpu", "dtype": torch.float32}


def test_in_the_ladders_order_all_go_together_on_a_cpu():
    assert refusals(RUNGS, **CPU) == {}


@pytest.mark.parametrize(
    ("rungs", "options", "refused", "word"),
    [
        (["bfloat16", "step"], {"dtype": torch.bfloat16}, "bfloat16", "already"),
        (["int4", "int8"], {}, "int8", "4 bits already"),
        (["speculation"], {}, "speculation", "step"),
        (["speculation", "step"], {}, "speculation", "step"),
        (["step", "speculation"], {"has_proposer": False}, "speculation", "drafts"),
    ],
)
def test_what_does_not_go_on_is_named_with_its_reason(rungs, options, refused, word):
    found = refusals(rungs, **(CPU | options))
    assert list(found) == [refused]
    assert word in found[refused]


@pytest.mark.parametrize("order", [["step", "quantized_kv"], ["quantized_kv", "step"]])
def test_a_cuda_graph_and_a_moving_cache_exclude_each_other(order, monkeypatch):
    monkeypatch.setattr("labkit._check.device", lambda name, value: torch.device(value))
    assert list(refusals(order, device="cuda", dtype=torch.bfloat16)) == [order[1]]
    assert refusals(order, **CPU) == {}


@pytest.mark.parametrize("rungs", [["int5"], "int4", ["step", "step"], None])
def test_wrong_rungs_are_refused_by_name(rungs):
    with pytest.raises(ValueError, match="rungs: got"):
        refusals(rungs, **CPU)
