"""`model.generate(custom_generate=...)`: what transformers does alone, and nothing ignored."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, MinLengthLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation import MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from labkit.kv_cache import QuantizedCache
from labkit.models import tiny_model
from labkit.speculative import DraftModel, PromptLookup
from labkit.speculative.hook import custom_generate
from tests.speculative.distribution import chi_square_p_value, counted

TARGET = tiny_model()
DRAFT = tiny_model(num_hidden_layers=1)
IDS = torch.randint(0, 256, (2, 10), generator=torch.Generator().manual_seed(3))


def ours(ids: torch.Tensor = IDS, **options: object) -> torch.Tensor:
    given = {"draft_model": DRAFT, "num_assistant_tokens": 3, "max_new_tokens": 20, "do_sample": False} | options
    if "proposer" in given:
        given.pop("draft_model")
    return TARGET.generate(ids, custom_generate=custom_generate, **given)


@pytest.mark.parametrize("way", [{}, {"draft_model": DraftModel(DRAFT)}, {"proposer": PromptLookup()}])
def test_greedy_output_is_that_of_generate(way: dict[str, object]) -> None:
    made = ours(**way)
    assert torch.equal(made, TARGET.generate(IDS, max_new_tokens=20, do_sample=False))
    assert made.device == IDS.device


def test_lengths_are_those_of_generate() -> None:
    assert ours(max_new_tokens=7).shape == (2, 17)
    assert ours(max_new_tokens=None, max_length=15).shape == (2, 15)
    assert ours(stopping_criteria=[MaxLengthCriteria(13)]).shape == (2, 13)


def test_rows_are_padded_after_their_end_as_generate_does() -> None:
    alone = TARGET.generate(IDS, max_new_tokens=20, do_sample=False)
    ends = {"eos_token_id": [int(alone[0, 14]), 3], "pad_token_id": 9}
    wanted = TARGET.generate(IDS, max_new_tokens=20, do_sample=False, **ends)
    assert int(wanted[0, -1]) == 9, "no row was padded: another id to end with"
    assert torch.equal(ours(**ends), wanted)


def test_a_dict_is_returned_where_it_is_asked_for() -> None:
    out = ours(return_dict_in_generate=True)
    assert torch.equal(out.sequences, ours())


def test_num_assistant_tokens_reaches_the_draft() -> None:
    asked = []

    class Counting(PromptLookup):
        def propose(self, rows: list[list[int]], n: int) -> object:
            asked.append(n)
            return super().propose(rows, n)

    ours(IDS[:1], proposer=Counting(), num_assistant_tokens=2)
    assert max(asked) == 2
    asked.clear()
    ours(IDS[:1], proposer=Counting(), num_assistant_tokens=None, max_new_tokens=40)
    assert max(asked) == 20


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended += 1


def test_tokens_stream_once_with_the_prompt_first() -> None:
    streamer = Kept()
    made = ours(IDS[:1], token_streamer=streamer)
    assert streamer.tokens == made[0].tolist() and streamer.ended == 1


def test_sampling_follows_the_config_and_the_global_seed() -> None:
    small = tiny_model(
        vocab_size=8, num_hidden_layers=1, hidden_size=16, intermediate_size=16, max_position_embeddings=16
    )
    ids = torch.tensor([[3, 5]]).expand(100_000, -1)
    how = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_new_tokens": 1}
    call = {"custom_generate": custom_generate, "proposer": PromptLookup(), "num_assistant_tokens": 2}
    made = small.generate(ids, **how, **call)
    logits = small(ids[:1]).logits[:, -1] / 0.7
    p = TopKLogitsWarper(5)(None, logits).softmax(-1)
    ordered, order = p.sort(descending=True)
    p = p.scatter(1, order, ordered.masked_fill(ordered.cumsum(1) - ordered >= 0.9, 0))
    assert chi_square_p_value(counted(made[:, 2:], 8), p[0]) > 1e-3
    torch.manual_seed(5)
    one = small.generate(ids[:9], **how | {"max_new_tokens": 8}, **call)
    torch.manual_seed(5)
    assert torch.equal(one, small.generate(ids[:9], **how | {"max_new_tokens": 8}, **call))
    assert not torch.equal(one, small.generate(ids[:9], **how | {"max_new_tokens": 8}, **call))


def test_top_k_is_honoured() -> None:
    # Of one token there is nothing to draw: greedy.
    sampled = ours(do_sample=True, temperature=2.0, top_k=1)
    assert torch.equal(sampled, TARGET.generate(IDS, max_new_tokens=20, do_sample=False))


@pytest.mark.parametrize(("options", "said"), [
    ({"repetition_penalty": 1.2}, "logits_processor: got 'RepetitionPenaltyLogitsProcessor'; takes temperature"),
    ({"do_sample": True, "min_p": 0.1}, "logits_processor: got 'MinPLogitsWarper'"),
    ({"logits_processor": [MinLengthLogitsProcessor(3, 1)]}, "logits_processor: got 'MinLength"),
    ({"stopping_criteria": [MaxTimeCriteria(9.0)]}, "stopping_criteria: got 'MaxTimeCriteria'; takes a length"),
    ({"position_ids": torch.zeros(2, 10, dtype=torch.long)}, "position_ids: got 'others'"),
    ({"do_sample": True, "top_k": 0, "logits_processor": [TopPLogitsWarper(0.1, min_tokens_to_keep=5)]},
     "logits_processor: got 'TopPLogitsWarper with min_tokens_to_keep=5"),
    ({"num_beams": 2}, "generation_config: got \"the mode 'beam_search'\""),
    ({"return_dict_in_generate": True, "output_scores": True}, "generation_config: got 'output_scores=True'"),
    ({"attention_mask": torch.tensor([[0] + [1] * 9, [1] * 10])}, "attention_mask: got 'a batch with padding'"),
    ({"proposer": PromptLookup(), "draft_model": None, "past_key_values": DynamicCache()}, None),
    ({"draft_model": None}, "draft_model, proposer: got 'neither'"),
])  # fmt: skip
def test_what_is_not_computed_is_refused(options: dict[str, object], said: str | None) -> None:
    if said is None:
        assert ours(**options).shape == (2, 30)
        return
    with pytest.raises(ValueError) as error:
        ours(**options)
    assert str(error.value).startswith(said)


def test_both_ways_to_draft_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="got 'both'"):
        both = {"draft_model": DRAFT, "proposer": PromptLookup()}
        TARGET.generate(IDS, custom_generate=custom_generate, max_new_tokens=4, **both)


def test_a_cache_that_a_decoder_reads_is_used_and_others_are_refused() -> None:
    cache = QuantizedCache(TARGET.config, nbits=8, q_group_size=16, residual_length=16)
    made = ours(IDS[:1], past_key_values=cache)
    assert made.shape == (1, 30) and cache.length >= 29
    with pytest.raises(ValueError, match="past_key_values: got 'a cache of [0-9]+ tokens'; takes an empty one"):
        ours(IDS[:1], past_key_values=cache)
    held = DynamicCache()
    TARGET(IDS[:1, :5], past_key_values=held)
    with pytest.raises(ValueError, match="past_key_values: got 'a DynamicCache'"):
        ours(IDS[:1], past_key_values=held)
