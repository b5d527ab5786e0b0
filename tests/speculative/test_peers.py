"""transformers' assisted generation and prompt lookup beside ours: same tokens, calls counted, settings comparable."""

from __future__ import annotations

import pytest
import torch

from labkit.models import shared_copy, tiny_model
from labkit.speculative import DraftModel, PromptLookup
from labkit.speculative.peers import compare_peers, peer_methods

# Few tokens, so that a random model goes round in circles and look-ups find something.
SMALL = {"vocab_size": 6, "num_hidden_layers": 1}
TARGET = tiny_model(**SMALL)
PROMPTS = [torch.tensor([[1, 2, 3, 4, 1]]), torch.tensor([[5, 2]])]
NAMES = ["alone", "draft", "prompt lookup"], ["alone", "prompt lookup", "assistant"]


def test_all_ways_give_the_same_tokens_and_their_calls_are_counted() -> None:
    draft = shared_copy(TARGET)
    ours = {"draft": DraftModel(draft), "prompt lookup": PromptLookup()}
    options = {"max_new_tokens": 25, "num_assistant_tokens": 3, "draft": draft}
    result = compare_peers(TARGET, PROMPTS, ours, repeats=1, **options)
    wanted = [f"labkit, {name}" for name in NAMES[0]] + [f"transformers, {name}" for name in NAMES[1]]
    assert [method.name for method in result.methods] == wanted
    assert all(method.unequal == 0 and method.new_tokens == (25, 25) for method in result.methods)
    per_call = {method.name: method.stats and method.stats.tokens_per_target_call for method in result.methods}
    # One call a token without a draft; four tokens a call where the draft is always right, after the prompt's own.
    assert per_call["transformers, alone"] == 1
    assert per_call["labkit, draft"] == 4
    # The library's own loop took a call more here, 7 in place of 6.
    assert 3 < per_call["transformers, assistant"] <= 4
    for name in ("labkit, prompt lookup", "transformers, prompt lookup"):
        assert 1.2 < per_call[name] <= 4
    assert repr(result).count("\n") == 7


def test_the_assistants_own_settings_are_put_back() -> None:
    draft = tiny_model(**SMALL)
    draft.generation_config.num_assistant_tokens = 7
    draft.generation_config.assistant_confidence_threshold = 0.9
    methods = peer_methods(TARGET, {}, max_new_tokens=12, num_assistant_tokens=2, draft=draft)
    run = methods["transformers, assistant"](PROMPTS[1])
    # A threshold of 0.9 would have cut the drafts short; seven at a time would have taken fewer calls.
    assert run.stats.n_target_calls == 4
    config = draft.generation_config
    assert (config.num_assistant_tokens, config.assistant_confidence_threshold) == (7, 0.9)
    assert not TARGET._forward_pre_hooks


def test_a_draft_whose_calls_could_not_be_told_apart_is_refused() -> None:
    with pytest.raises(ValueError, match="draft: got 'the target itself'"):
        peer_methods(TARGET, {}, max_new_tokens=4, num_assistant_tokens=2, draft=TARGET)
    with pytest.raises(ValueError, match="num_assistant_tokens"):
        peer_methods(TARGET, {}, max_new_tokens=4, num_assistant_tokens=0)
