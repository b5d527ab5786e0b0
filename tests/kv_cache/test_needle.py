"""Needle prompts hold what they say, and a needle is found exactly where the cache still has it."""

import pytest
import torch
from transformers import DynamicCache

from labkit.kv_cache.needle import find_needles, find_needles_stream, needle_prompts
from labkit.kv_cache.sinks import SinkCache
from labkit.models import tiny_model

# Sentences of one length, where the course's text is another in each version of Python.
TEXT = " ".join(f"Sentence number {i} says nothing that matters to anybody." for i in range(100, 160))


class Bytes:
    """A tokenizer of one id a byte."""

    def __call__(self, text: str, add_special_tokens: bool = True):
        class Encoding:
            input_ids = list(text.encode("ascii", "replace"))

        return Encoding()


class Looker:
    """A model that copies: it goes on as the cached text did after the last 8 tokens, of which it needs all."""

    def __init__(self) -> None:
        self.config = tiny_model(num_hidden_layers=1).config  # it writes to one layer
        self.device = torch.device("cpu")
        self.base_model = self._read

    def get_output_embeddings(self):
        return lambda hidden: hidden

    def _read(self, input_ids, past_key_values, use_cache):
        states = input_ids[0, None, None, :, None].float()
        keys, _ = past_key_values.update(states.repeat(1, 1, 1, 16), states.repeat(1, 1, 1, 16), 0)
        seen = keys[0, 0, :, 1].round().long().tolist()
        hits = [i for i in range(len(seen) - 8) if seen[i : i + 8] == seen[-8:]]
        logits = torch.zeros(1, 1, 256)
        logits[0, 0, seen[hits[-1] + 8] if hits else 0] = 1.0

        class Out:
            last_hidden_state = logits

        return Out()


def text_of(ids: torch.Tensor) -> str:
    return bytes(ids.tolist()).decode()


@pytest.mark.parametrize("context_length", [400, 900])
def test_a_prompt_is_a_text_with_its_fact_at_its_depth_and_ends_before_it_again(context_length):
    prompts = needle_prompts(Bytes(), n=12, context_length=context_length, depths=(0.0, 0.4, 1.0), seed=2)
    assert [p.depth for p in prompts] == [0.0, 0.4, 1.0] * 4
    for prompt in prompts:
        text, answer = text_of(prompt.input_ids), text_of(prompt.answer_ids)
        assert len(text) <= context_length
        assert text.count(prompt.fact) == 1 and text.index(f" {prompt.fact}") == prompt.fact_at
        question = prompt.fact[: -len(answer) - 1]
        assert text.endswith(f" {question}") and text.count(question) == 2
        assert prompt.fact == f"{question}{answer}." and answer.strip().isdigit() and len(answer) == 5
        room = len(text) - 2 * len(question) - 8
        assert abs(prompt.fact_at / room - prompt.depth) < 150 / room + 0.05
    assert len({p.fact for p in prompts}) > 8


def test_a_seed_gives_the_same_prompts_and_another_gives_others():
    first, again, other = (
        [text_of(p.input_ids) for p in needle_prompts(Bytes(), n=4, context_length=500, seed=s)] for s in (3, 3, 4)
    )
    assert first == again
    assert not set(first) & set(other)


def test_needles_are_found_where_the_cache_still_has_them():
    model = Looker()
    prompts = needle_prompts(Bytes(), n=6, context_length=500, depths=(0.1, 0.9), seed=1, text=TEXT)
    everything = find_needles(model, prompts, DynamicCache)
    assert (everything.found, everything.tried, everything.failed) == (6, 6, ())
    assert str(everything) == "6 of 6 needles found"
    window = find_needles(model, prompts, lambda: SinkCache(model.config, window_length=250, num_sink_tokens=0))
    assert (window.found, window.tried) == (3, 6)
    assert [p.depth for p in window.failed] == [0.1] * 3
    chunked = find_needles(model, prompts, DynamicCache, chunk=7)
    assert chunked.found == 6


def test_one_wrong_token_is_a_needle_lost():
    model = Looker()
    prompts = needle_prompts(Bytes(), n=1, context_length=400)
    prompts[0].answer_ids[-1] = ord("x")
    assert find_needles(model, prompts, DynamicCache).failed == tuple(prompts)


def test_the_stream_counts_prompt_by_prompt():
    prompts = needle_prompts(Bytes(), n=4, context_length=500, depths=(0.1, 0.9), seed=1, text=TEXT)
    model = Looker()
    counts = list(
        find_needles_stream(model, prompts, lambda: SinkCache(model.config, window_length=250, num_sink_tokens=0))
    )
    assert [(c.found, c.tried) for c in counts] == [(0, 1), (1, 2), (1, 3), (2, 4)]


def test_wrong_arguments_are_refused_at_the_call():
    for change in ({"n": 0}, {"context_length": 63}, {"depths": (1.5,)}, {"depths": ()}, {"seed": -1}, {"text": "No."}):
        with pytest.raises(ValueError, match=f"^{next(iter(change))}: got"):
            needle_prompts(Bytes(), **change)
    with pytest.raises(ValueError, match="context_length: got .*more tokens"):
        needle_prompts(Bytes(), context_length=100)
    prompts = needle_prompts(Bytes(), n=1, context_length=400)
    with pytest.raises(ValueError, match="prompts: got 'none'"):
        find_needles_stream(tiny_model(), [], DynamicCache)
    with pytest.raises(ValueError, match="prompts: got 'id"):
        find_needles_stream(tiny_model(vocab_size=64), prompts, DynamicCache)
    with pytest.raises(ValueError, match="chunk: got 0"):
        find_needles_stream(tiny_model(), prompts, DynamicCache, chunk=0)
    shared = DynamicCache()
    with pytest.raises(ValueError, match="make_cache: got"):
        find_needles(tiny_model(), [*prompts, *prompts], lambda: shared)


@pytest.mark.slow
def test_the_default_model_finds_nine_of_ten_with_all_of_its_past(default_model):
    prompts = needle_prompts(default_model, n=30, context_length=256)
    assert find_needles(default_model, prompts, DynamicCache).found >= 27
