"""Prompts to train a drafter on: what the target itself makes users say, requests of the kinds that people type, and
tasks over the calibration text."""

from __future__ import annotations

import functools
import itertools
import random
import string
from collections.abc import Iterable, Iterator

import torch
import yaml
from transformers import PreTrainedTokenizerBase

from labkit._paths import DATA
from labkit.corpora import load_text
from labkit.engine.decode import Decoder
from labkit.engine.sampling import sample
from labkit.speculative.prompts import KINDS, load_prompts

_ROWS = 96
# A user's turn is at most this long; what is longer is left out, not cut.
_TURN_TOKENS = 48
_LEAST_CHARACTERS = 12
# A prompt that shares so many words in a row with a held-out one is left out, or so large a part of its topic.
_SHARED_WORDS, _SHARED_TOPIC = 8, 0.4
_ANYWHERE = frozenset(
    "the and for are was were did does how what why who when where which can could should would will you your its "
    "this that these those with from about not then than they them our has have had give tell write explain list "
    "suggest make short simple terms some three two four five six seven please help want need know best way get "
    "say something into out over under between difference compare one first last few good new old there their his "
    "her example examples sentence paragraph story poem email letter message function python ideas plan describe "
    "without more most any all just also only too very much many each every another use using like used work "
    "works come comes take takes keep keeps start people person time day year word mean means".split()
)

_TEXT_TASKS = (
    "Summarize the following text:",
    "Rewrite the following text in simpler words:",
    "Correct the mistakes in this text:",
    "Quote the most important sentence of this text and explain it:",
    "Copy this text and change nothing:",
    "Continue this text:",
)
_CODE_TASKS = (
    "Explain what this code does:",
    "Add a docstring to this code:",
    "Find the bug in this code and write it again:",
    "Rewrite this code with better names:",
)
_PASSAGE_TOKENS = (40, 56, 72, 88)
_MARK = "\0"


class ChatTemplate:
    """A tokenizer's chat template as ids: what stands before a user's text, and what between it and the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        turn = [{"role": "user", "content": _MARK}]
        before, after = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True).split(_MARK)
        self.before, self.after = self.ids(before), self.ids(after)

    def ids(self, text: str) -> list[int]:
        """Ids of a text without special tokens of its own."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    def __call__(self, prompt: str) -> list[int]:
        """A whole prompt, up to where the answer begins."""
        return [*self.before, *self.ids(prompt), *self.after]


def self_prompts(decoder: Decoder, template: ChatTemplate, count: int, generator: torch.Generator) -> list[str]:
    """At least `count` different texts that the target writes in a user's turn (Magpie: Xu et al. 2024, arXiv
    2406.08464, section 2): an instruction-tuned model that is given its template's opening alone writes one itself."""
    eos, found = template.tokenizer.eos_token_id, set()
    while len(found) < count:
        decoder.reset()
        tokens, turns = torch.tensor([template.before] * _ROWS), []
        for _ in range(_TURN_TOKENS):
            logits = decoder.forward(tokens, logits_to_keep=1)[:, -1]
            # Among the 60 likeliest: the tail is where a small model's nonsense begins.
            tokens = sample(logits, 1.0, 60, 1.0, generator)[:, None]
            turns.append(tokens)
        for turn in torch.cat(turns, 1).tolist():
            if eos in turn:
                text = template.tokenizer.decode(turn[: turn.index(eos)]).strip()
                found |= {text} if len(text) >= _LEAST_CHARACTERS else set()
    return sorted(found)


@functools.cache
def _written() -> tuple[str, ...]:
    stored = yaml.safe_load((DATA / "training_prompts.yaml").read_text(encoding="utf-8"))
    prompts = []
    for form in stored["forms"]:
        lists = [name for _, name, _, _ in string.Formatter().parse(form) if name]
        fillings = itertools.product(*(stored[name] for name in lists))
        prompts += [form.format(**dict(zip(lists, filling, strict=True))) for filling in fillings]
    return tuple(prompts)


def written_prompts(count: int, rng: random.Random) -> list[str]:
    """`count` of the requests of `data/training_prompts.yaml`, each at most once. People ask in other words and for
    other things than a small model does when it plays the user."""
    return rng.sample(_written(), count)


def passage_prompts(template: ChatTemplate, count: int, rng: random.Random) -> Iterator[str]:
    """Tasks over passages of the calibration splits, prose and code in turn."""
    sources = [
        (template.ids(load_text(name, "calibration")), tasks)
        for name, tasks in (("pydoc", _TEXT_TASKS), ("python-source", _CODE_TASKS))
    ]
    for index in range(count):
        ids, tasks = sources[index % len(sources)]
        length = rng.choice(_PASSAGE_TOKENS)
        start = rng.randrange(len(ids) - length)
        yield f"{rng.choice(tasks)}\n\n{template.tokenizer.decode(ids[start : start + length]).strip()}"


def not_held_out(prompts: Iterable[str]) -> list[str]:
    """Those that ask for nothing that a held-out prompt of `data/prompts.yaml` asks for: they share no run of words
    with one, nor two fifths of what either is about, nor all of what the shorter is about."""
    held_out = [text for kind in KINDS for text in load_prompts(kind)]
    runs, topics = set().union(*map(_runs, held_out)), [_topic(text) for text in held_out]
    return [p for p in prompts if not _runs(p) & runs and not any(_near(_topic(p), topic) for topic in topics)]


def _words(text: str) -> tuple[str, ...]:
    return tuple("".join(c if c.isalnum() else " " for c in text.casefold()).split())


def _runs(text: str) -> set[tuple[str, ...]]:
    """Each run of so many words; a shorter text is one run itself."""
    words = _words(text)
    return {words[i : i + _SHARED_WORDS] for i in range(max(1, len(words) - _SHARED_WORDS + 1))}


def _topic(text: str) -> frozenset[str]:
    """What a text is about: its words, in the singular, less those that any request may hold."""
    return frozenset(word.removesuffix("s") for word in _words(text) if len(word) > 2 and word not in _ANYWHERE)


def _near(one: frozenset[str], other: frozenset[str]) -> bool:
    shared = len(one & other)
    return bool(shared) and (shared >= _SHARED_TOPIC * len(one | other) or shared == min(len(one), len(other)))
