"""A fact in a text, and whether a model still finds it through a cache: retrieval in completion form."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit import _check
from labkit.corpora import load_text
from labkit.kv_cache.evaluation import fresh_cache
from labkit.models import LoadedModel, plain_model

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

_COLOURS = ("blue", "green", "red", "white", "black", "yellow", "brown", "grey")
_PLACES = ("house", "garden", "tower", "bridge", "station", "boat", "school", "market")
_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_DIGITS = 4


@dataclass(frozen=True, eq=False)
class NeedlePrompt:
    """One test: a text with a fact in it, that ends where the fact would have to be said again.

    input_ids: `(n_tokens,)`, at most context_length of them. answer_ids: `(n_answer,)`, the tokens that have to follow,
    one by one. depth: where the fact stands, from 0 (the start) to 1 (just before the question); fact_at: its first
    token's index.
    """

    input_ids: Tensor
    answer_ids: Tensor
    depth: float
    fact_at: int
    fact: str


@dataclass(frozen=True)
class NeedleCount:
    """How many of the prompts tried a model continued with their fact, and those that it did not."""

    found: int
    tried: int
    failed: tuple[NeedlePrompt, ...]

    def __str__(self) -> str:
        return f"{self.found} of {self.tried} needles found"


def needle_prompts(
    tokenizer: PreTrainedTokenizerBase | LoadedModel,
    *,
    n: int = 30,
    context_length: int = 256,
    depths: Sequence[float] = _DEPTHS,
    seed: int = 0,
    text: str | None = None,
) -> list[NeedlePrompt]:
    """`n` prompts of at most `context_length` tokens, which take the `depths` in turn.

    Each is a stretch of whole sentences from `text` (None: the calibration part of "pydoc") with one more among them,
    such as "The secret number of the blue house is 4729.", and ends with "The secret number of the blue house is".
    The same arguments give the same prompts.
    Errors: ValueError for a depth outside 0 to 1, and for a context_length without room for text around the fact.
    """
    tokenizer = tokenizer.tokenizer if isinstance(tokenizer, LoadedModel) else tokenizer
    _check.integer("n", n, 1)
    _check.integer("context_length", context_length, 64)
    _check.require(len(depths) > 0, "depths", depths, "at least one number from 0 to 1")
    depths = [_check.number("depths", depth, 0, 1) for depth in depths]
    rng = random.Random(_check.seed("seed", seed))
    sentences = _sentences(load_text("pydoc", "calibration") if text is None else text)
    takes = "a text of at least 20 sentences"
    _check.require(len(sentences) >= 20, "text", f"{len(sentences)} sentences", takes)
    return [_prompt(tokenizer, sentences, context_length, depths[i % len(depths)], rng) for i in range(n)]


def _sentences(text: str) -> list[str]:
    """Sentences of prose: from a capital letter to a full stop, on one line."""
    flat = re.sub(r"\s+", " ", text)
    return [s for s in re.split(r"(?<=[.?!]) (?=[A-Z])", flat) if 40 <= len(s) <= 300]


def _prompt(
    tokenizer: PreTrainedTokenizerBase, sentences: list[str], context_length: int, depth: float, rng: random.Random
) -> NeedlePrompt:
    subject = f"The secret number of the {rng.choice(_COLOURS)} {rng.choice(_PLACES)} is"
    number = "".join(str(rng.randrange(1 if i == 0 else 0, 10)) for i in range(_DIGITS))
    question, fact = (_encode(tokenizer, s) for s in (f" {subject}", f" {subject} {number}."))
    answer = fact[len(question) : -1]
    known = fact[: len(question)] == question and answer
    _check.require(bool(known), "tokenizer", type(tokenizer).__name__, "one that cuts words apart at their spaces")
    before, after = _filler(tokenizer, sentences, context_length - len(fact) - len(question), depth, rng)
    ids = torch.tensor(before + fact + after + question)
    return NeedlePrompt(ids, torch.tensor(answer), depth, len(before), f"{subject} {number}.")


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _filler(
    tokenizer: PreTrainedTokenizerBase, sentences: list[str], room: int, depth: float, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Whole sentences that follow each other, at most `room` tokens, as those before the fact and those after it."""
    at, pieces, length = rng.randrange(len(sentences)), [], 0
    while True:
        piece = _encode(tokenizer, f" {sentences[at % len(sentences)]}")
        if length + len(piece) > room:
            break
        pieces.append(piece)
        length, at = length + len(piece), at + 1
    takes = "more tokens: not one sentence fits beside the fact"
    _check.require(bool(pieces), "context_length", room, takes)
    # The cut between two sentences that is nearest to the depth.
    cuts = [sum(map(len, pieces[:i])) for i in range(len(pieces) + 1)]
    cut = min(range(len(cuts)), key=lambda i: abs(cuts[i] - depth * length))
    return [t for p in pieces[:cut] for t in p], [t for p in pieces[cut:] for t in p]


def find_needles(
    model: PreTrainedModel | LoadedModel,
    prompts: Sequence[NeedlePrompt],
    make_cache: Callable[[], Cache],
    *,
    chunk: int | None = None,
) -> NeedleCount:
    """Whether the model, reading through a cache from `make_cache`, continues each prompt with its answer exactly.

    All of a prompt but its last token goes in as one step, or `chunk` tokens a step; then, token by token, each guess
    has to be the highest of all, so that all of the answer is read out of what the cache kept.
    Errors: ValueError for no prompts, ids outside the vocabulary, and for a cache that comes with tokens in it.
    """
    *_, last = find_needles_stream(model, prompts, make_cache, chunk=chunk)
    return last


def find_needles_stream(
    model: PreTrainedModel | LoadedModel,
    prompts: Sequence[NeedlePrompt],
    make_cache: Callable[[], Cache],
    *,
    chunk: int | None = None,
) -> Iterator[NeedleCount]:
    """As `find_needles`, prompt by prompt: yields the count so far. Arguments are checked at the call."""
    model = plain_model(model)
    _check.require(len(prompts) > 0, "prompts", "none", "at least one NeedlePrompt")
    if chunk is not None:
        _check.integer("chunk", chunk, 1)
    highest = max(int(p.input_ids.max()) for p in prompts)
    vocab_size = model.config.vocab_size
    _check.require(highest < vocab_size, "prompts", f"id {highest}", f"ids below {vocab_size}, the model's vocabulary")
    return _counts(model, prompts, make_cache, chunk)


def _counts(
    model: PreTrainedModel, prompts: Sequence[NeedlePrompt], make_cache: Callable[[], Cache], chunk: int | None
) -> Iterator[NeedleCount]:
    failed: list[NeedlePrompt] = []
    for tried, prompt in enumerate(prompts, 1):
        if not _found(model, prompt, fresh_cache(make_cache), chunk):
            failed.append(prompt)
        yield NeedleCount(tried - len(failed), tried, tuple(failed))


@torch.no_grad()
def _found(model: PreTrainedModel, prompt: NeedlePrompt, cache: Cache, chunk: int | None) -> bool:
    ids, answer = prompt.input_ids.to(model.device), prompt.answer_ids.tolist()
    for step in ids[:-1].split(chunk or len(ids)):
        model.base_model(input_ids=step[None], past_key_values=cache, use_cache=True)
    token = int(ids[-1])
    for expected in answer:
        step = torch.tensor([[token]], device=model.device)
        out = model.base_model(input_ids=step, past_key_values=cache, use_cache=True)
        token = int(model.get_output_embeddings()(out.last_hidden_state[0, -1]).argmax())
        if token != expected:
            return False
    return True
