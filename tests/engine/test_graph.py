"""What a CUDA graph captures, run without one: fixed shapes, and the same logits. The graph itself: tests/gpu."""

import pytest
import torch

from labkit.engine import Decoder, graph
from labkit.engine.graph import DecodeGraphs, static_step
from labkit.models import tiny_model

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("length", "q_len", "kv_len"),
    [(1, 1, 256), (200, 1, 256), (255, 1, 256), (256, 1, 512), (200, 2, 256), (251, 5, 256), (250, 16, 512)],
)
@torch.inference_mode()
def test_a_step_of_fixed_shapes_is_the_step(batch: int, length: int, q_len: int, kv_len: int) -> None:
    decoder = Decoder(tiny_model(max_position_embeddings=512))
    decoder.reserve(batch, 512)
    vocab = decoder.model.config.vocab_size
    decoder.forward(torch.randint(vocab, (batch, length)))
    # What lies past the end must not show, as after a crop.
    decoder.cache.keys[:, :, :, length:].fill_(7.0)
    decoder.cache.values[:, :, :, length:].fill_(7.0)
    tokens = torch.randint(vocab, (batch, q_len))
    logits, hidden = static_step(decoder._ops, tokens, torch.tensor([length]), decoder.cache, decoder._rotary, kv_len)
    expected, expected_hidden = decoder.forward(tokens, return_hidden=True)
    torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(hidden, expected_hidden, **CLOSE)


@torch.inference_mode()
def test_one_captured_step_serves_every_slot() -> None:
    """Nothing of a step is fixed by the slot it was captured at: run with fake values for it, all shapes are known."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    decoder = Decoder(tiny_model(max_position_embeddings=512))
    decoder.fill_cache(1, 40)
    tokens, slot = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([40])
    # A fake tensor has no values: to look at one raises.
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        seen = static_step(
            decoder._ops, fake.from_tensor(tokens), fake.from_tensor(slot), decoder.cache, decoder._rotary, 256
        )
    config = decoder.model.config
    assert [tuple(x.shape) for x in seen] == [(1, 4, config.vocab_size), (1, 4, config.hidden_size)]


class Recorded:
    """In the place of a captured graph: replays the step that a graph would hold, into the same fixed tensors."""

    def __init__(self, ops, cache, rotary, q_len, kv_len, pool) -> None:
        self.tokens, self.slot = torch.zeros(cache.batch, q_len, dtype=torch.int64), torch.tensor([cache.length])
        self.arguments = (ops, self.tokens, self.slot, cache, rotary, kv_len)
        self.logits, self.hidden = static_step(*self.arguments)
        self.graph = self

    def pool(self) -> None: ...

    def replay(self) -> None:
        for fixed, new in zip((self.logits, self.hidden), static_step(*self.arguments), strict=True):
            fixed.copy_(new)


def test_steps_through_graphs_are_the_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which graph, at which slot, what of its results, and when none: all but the capture itself. One chunk passes the
    end of a bucket of 256 slots."""
    monkeypatch.setattr(graph, "_Graph", Recorded)
    model = tiny_model(max_position_embeddings=600)
    eager, graphed = Decoder(model), Decoder(model)
    graphed._graphs = DecodeGraphs()
    for decoder in (eager, graphed):
        decoder.reserve(2, 512)
        decoder.forward(torch.arange(498).view(2, 249) % 128)
    results = []
    chain = torch.ones(3, 3, dtype=torch.bool).tril()
    for decoder in (eager, graphed):
        made = []
        for q_len, kept in ((1, None), (4, 2), (4, None), (1, 1), (16, 1), (17, 1), (4, 4)):
            tokens = torch.arange(2 * q_len).view(2, q_len) + 7
            made += decoder.forward(tokens, logits_to_keep=kept, return_hidden=True)
            made.append(decoder.forward(tokens, logits_to_keep=kept))
        made.append(decoder.forward(tokens[:, :3], tree_mask=chain))
        decoder.crop([280, 300])
        made.append(decoder.forward(tokens))
        decoder.crop(250)
        made.append(decoder.forward(tokens))
        results.append(made)
    assert len(results[0]) == len(results[1]) == 24
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, **CLOSE)
    assert sorted(graphed._graphs._graphs) == [(1, 256), (1, 512), (4, 256), (4, 512), (16, 512)]
