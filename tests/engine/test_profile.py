"""op_times clocks the real step."""

import time

import pytest
import torch

from labkit.engine import Decoder, count_launches, op_times
from labkit.models import tiny_model
from labkit.roofline import op_costs


@pytest.fixture
def decoder() -> Decoder:
    decoder = Decoder(tiny_model())
    decoder.fill_cache(2, 20)
    return decoder


@pytest.mark.parametrize("q_len", [1, 5])
def test_it_clocks_every_op_that_the_roofline_counts(decoder: Decoder, q_len: int) -> None:
    times = op_times(decoder, torch.ones(2, q_len, dtype=torch.long), repeats=3)
    costs = op_costs(decoder.model.config, batch=2, q_len=q_len, kv_len=20 + q_len, dtype=torch.float32)
    assert list(times) == [cost.name for cost in costs]
    assert all(timing.n == 3 and timing.median > 0 for timing in times.values())
    assert decoder.length == 20


def test_the_ops_together_are_the_step(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op made slow by a known time shows that time, in its own row and in no other."""
    lm_head = decoder._ops.lm_head
    slow = lambda x: (time.sleep(0.03), lm_head(x))[1]  # noqa: E731
    monkeypatch.setattr(
        decoder,
        "_ops",
        type(decoder._ops)(
            *(slow if name == "lm_head" else getattr(decoder._ops, name) for name in decoder._ops.__slots__)
        ),
    )
    times = op_times(decoder, torch.ones(2, 1, dtype=torch.long), repeats=3)
    assert 0.03 <= times["lm_head"].median < 0.06
    assert sum(t.median for name, t in times.items() if name != "lm_head") < 0.03


def test_launches_are_the_calls_that_do_work() -> None:
    x = torch.randn(4, 4)
    if torch.cuda.is_available():
        x = x.cuda()
    assert count_launches(lambda: x.add(1).view(16).mul(2).unsqueeze(0)) == 2
    # A layer more is the same calls once more, whatever stands around the layers.
    step = {}
    for layers in (1, 2, 3):
        decoder = Decoder(tiny_model(num_hidden_layers=layers))
        decoder.fill_cache(1, 8)
        step[layers] = count_launches(lambda d=decoder: (d.forward(torch.ones(1, 1, dtype=torch.long)), d.crop(8)))
    assert step[3] - step[2] == step[2] - step[1] > 10
