"""The held-out prompts: of each kind as many as said, no two alike, and the kinds do what their names say."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from labkit.engine.decode import Decoder
from labkit.models import load_model
from labkit.quantization import RTNConfig, quantize_
from labkit.speculative import EagleHead, PromptLookup, SpeculativeStats, generate
from labkit.speculative.prompts import KINDS, load_prompts, prompt_ids, repeated_share, typical_prompt

if TYPE_CHECKING:
    from labkit.models import LoadedModel


@pytest.mark.parametrize(("kind", "count"), [("chat", 50), ("copy_heavy", 12), ("no_repeats", 10)])
def test_as_many_as_said_and_no_empty_one(kind: str, count: int) -> None:
    prompts = load_prompts(kind)
    assert len(prompts) == count
    assert all(isinstance(prompt, str) and prompt == prompt.strip() and prompt for prompt in prompts)


def test_no_two_are_alike_within_a_kind_or_across() -> None:
    every = [prompt for kind in KINDS for prompt in load_prompts(kind)]
    assert len({prompt.casefold() for prompt in every}) == len(every)
    short = [prompt for prompt in every if len(prompt) < 200]
    close = [
        (a, b) for i, a in enumerate(short) for b in short[:i] if difflib.SequenceMatcher(None, a, b).ratio() > 0.8
    ]
    assert close == []


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind: got 'chats'; takes one of .*chat"):
        load_prompts("chats")


def test_ids_are_one_turn_of_the_template_up_to_the_answer(default_model: LoadedModel) -> None:
    tokenizer = default_model.tokenizer
    ids = prompt_ids(tokenizer, "How do bees make honey?")
    assert ids.shape[0] == 1 and ids.dtype == torch.int64
    text = tokenizer.decode(ids[0])
    assert text.count("How do bees make honey?") == 1
    assert text.endswith("<|im_start|>assistant\n")


def test_what_is_no_prompt_is_refused(default_model: LoadedModel) -> None:
    with pytest.raises(ValueError, match="prompt: got ' '"):
        prompt_ids(default_model.tokenizer, " ")
    with pytest.raises(ValueError, match="chat template"):
        prompt_ids(object(), "Hello")


def test_material_of_copy_heavy_prompts_has_60_to_200_tokens(default_model: LoadedModel) -> None:
    sizes = [len(default_model.tokenizer(prompt)["input_ids"]) for prompt in load_prompts("copy_heavy")]
    assert all(60 <= size <= 200 for size in sizes), sizes


def test_repeated_share_counts_what_ends_a_known_ngram() -> None:
    # After the prompt 1 2 3: "2 3" ends at the last token; "3 9" and "9 2" are new.
    assert repeated_share([1, 2, 3, 9, 2, 3], 3, ngram=2) == pytest.approx(1 / 3)
    # The answer's own repeat counts only where not asked for the prompt's.
    assert repeated_share([1, 7, 8, 9, 7, 8], 1, ngram=2) == pytest.approx(1 / 5)
    assert repeated_share([1, 7, 8, 9, 7, 8], 1, ngram=2, of_prompt=True) == 0
    # An n-gram whose first tokens are the prompt's last ones counts, once it stood there before.
    assert repeated_share([5, 6, 5, 6], 3, ngram=2) == 1
    with pytest.raises(ValueError, match="prompt"):
        repeated_share([1, 2], 2)


@torch.inference_mode()
def answers(model: LoadedModel, kind: str, new: int) -> list[tuple[list[int], int]]:
    """The greedy answer to each prompt of a kind, prompt and answer in one, with the prompt's length.

    All prompts at once, since a step reads the weights for one row or for twelve.
    """
    decoder, stop = Decoder(model), model.tokenizer.eos_token_id
    rows = [prompt_ids(model.tokenizer, prompt)[0] for prompt in load_prompts(kind)]
    decoder.reserve(len(rows), max(map(len, rows)) + new)
    decoder.forward(pad_sequence(rows, batch_first=True), logits_to_keep=1)
    decoder.crop([len(row) - 1 for row in rows])
    made = [torch.stack([row[-1:] for row in rows])]
    for _ in range(new):
        made.append(decoder.forward(made[-1])[:, -1].argmax(-1, keepdim=True))
    found = []
    for row, tokens in zip(rows, torch.cat(made[1:], 1).tolist(), strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else new
        found.append((row.tolist() + tokens[:end], len(row)))
    return found


@pytest.mark.slow
def test_the_default_model_copies_where_the_kind_says_so_and_repeats_nothing_where_it_says_that() -> None:
    model = load_model(dtype="bfloat16", device="cpu")
    copied = [repeated_share(made, asked, of_prompt=True) for made, asked in answers(model, "copy_heavy", 96)]
    # An answer hangs on the last bit of a logit: by another processor's rounding one may turn out otherwise.
    assert len(copied) == 12 and sorted(copied)[1] >= 0.5, copied
    repeated = [repeated_share(made, asked) for made, asked in answers(model, "no_repeats", 64)]
    assert len(repeated) == 10 and max(repeated) <= 0.1, repeated


@pytest.mark.slow
def test_the_typical_prompt_is_typical_of_what_the_head_gets_right() -> None:
    target, head = load_model(dtype="bfloat16", device="cpu"), EagleHead.load()
    quantize_(target, RTNConfig(bits=4, group_size=64), progress=False)
    decoder = Decoder(target)

    def counted(prompt: str) -> SpeculativeStats:
        ids = prompt_ids(target.tokenizer, prompt)
        return generate(decoder, ids, head, max_new_tokens=64, num_assistant_tokens=3).stats

    others = sum(map(counted, load_prompts("chat")[1:24:3]), SpeculativeStats())
    assert abs(counted(typical_prompt()).acceptance_rate - others.acceptance_rate) < 0.08


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "float32"])
def test_the_typical_prompt_to_copy_from_is_typical_of_what_lookup_gets_right(weights: str) -> None:
    target = load_model(dtype="bfloat16" if weights == "int4" else "float32", device="cpu")
    if weights == "int4":
        quantize_(target, RTNConfig(bits=4, group_size=64), progress=False)
    decoder = Decoder(target)

    def counted(prompt: str) -> SpeculativeStats:
        ids = prompt_ids(target.tokenizer, prompt)
        return generate(decoder, ids, PromptLookup(), max_new_tokens=64, num_assistant_tokens=3).stats

    others = sum(map(counted, load_prompts("copy_heavy")[1::2]), SpeculativeStats())
    mine = counted(typical_prompt("copy_heavy")).tokens_per_target_call
    assert mine > 2 and abs(mine / others.tokens_per_target_call - 1) < 0.25
