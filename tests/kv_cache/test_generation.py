"""Generation with a cache against without: the same tokens, and work that grows otherwise."""

import pytest
import torch

from labkit.kv_cache.generation import time_generation
from labkit.models import tiny_model


def test_the_ratio_grows_with_the_length():
    model = tiny_model(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    prompt = torch.arange(1, 9)[None]
    short, long = (time_generation(model, prompt, new) for new in (4, 500))
    assert (short.prompt_length, short.new_tokens, long.new_tokens) == (8, 4, 500)
    assert long.ratio > 1.5 * short.ratio


def test_refuses_what_is_no_prompt():
    with pytest.raises(ValueError, match="prompt"):
        time_generation(tiny_model(), torch.arange(4), 4)
    with pytest.raises(ValueError, match="new_tokens"):
        time_generation(tiny_model(), torch.arange(4)[None], 0)


def test_a_cache_that_changes_tokens_is_not_timed():
    model = tiny_model()
    plain = model.forward

    def forward(*args, past_key_values=None, **kwargs):
        out = plain(*args, past_key_values=past_key_values, **kwargs)
        if past_key_values is None:
            out.logits = -out.logits
        return out

    model.forward = forward
    with pytest.raises(RuntimeError, match="other tokens"):
        time_generation(model, torch.arange(1, 9)[None], 8)
