"""What a CUDA graph captures, run without one: fixed shapes, and the same logits. The graph itself: tests/gpu."""

import pytest
import torch

from labkit.engine import Decoder
from labkit.engine.graph import static_step
from labkit.models import tiny_model


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("length", "kv_len"), [(1, 256), (200, 256), (255, 256), (256, 512)])
@torch.inference_mode()
def test_a_step_of_fixed_shapes_is_the_step(batch: int, length: int, kv_len: int) -> None:
    decoder = Decoder(tiny_model(max_position_embeddings=512))
    decoder.reserve(batch, 512)
    vocab = decoder.model.config.vocab_size
    decoder.forward(torch.randint(vocab, (batch, length)))
    # What lies past the end must not show, as after a crop.
    decoder.cache.keys[:, :, :, length:].fill_(7.0)
    decoder.cache.values[:, :, :, length:].fill_(7.0)
    token = torch.randint(vocab, (batch, 1))
    got = static_step(decoder._ops, token, torch.tensor([length]), decoder.cache, decoder._rotary, kv_len)
    torch.testing.assert_close(got, decoder.forward(token), rtol=1e-4, atol=2e-5)
