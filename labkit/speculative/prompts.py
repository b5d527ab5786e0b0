"""Held-out prompts from `data/prompts.yaml`: what speculation is measured on, and what nothing is trained on."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import yaml

from labkit import _check
from labkit._paths import DATA

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("chat", "copy_heavy", "no_repeats")
# Each about the mean of its kind, with an int4 target and three drafted a call, on more than one make of processor: an
# answer hangs on the last bit of a logit, and where single prompts copy little with one rounding they may with another.
# Chat: what to pack for a hike; 42% of what the course's head drafts is accepted, 41% over the first 24 prompts, where
# single ones reach from 24% to 58%; its answer is none of those that loop. To copy from: a letter to proofread; prompt
# lookup gives 2.7 to 2.9 tokens a target call, 2.7 over all 12, where the first one gives 1.2 or 2.4.
_TYPICAL = {"chat": 9, "copy_heavy": 7, "no_repeats": 0}


@functools.cache
def _stored() -> dict[str, tuple[str, ...]]:
    stored = yaml.safe_load((DATA / "prompts.yaml").read_text(encoding="utf-8"))
    return {kind: tuple(stored[kind]) for kind in KINDS}


def load_prompts(kind: str) -> tuple[str, ...]:
    """The prompts of one kind: "chat" (50), "copy_heavy" (12) whose answer copies much of the prompt, "no_repeats" (10)
    whose answer repeats next to nothing; the file says how both were measured. Errors: ValueError for another kind."""
    return _stored()[_check.choice("kind", kind, KINDS)]


def typical_prompt(kind: str = "chat") -> str:
    """The prompt of one kind to show one thing on: what is accepted there is about the mean over all of them."""
    return load_prompts(kind)[_TYPICAL[kind]]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> torch.Tensor:
    """`(1, n)`, int64: one user turn through the tokenizer's chat template, up to where the answer begins.

    Errors: ValueError for a prompt without text, and for a tokenizer without a chat template.
    """
    _check.require(isinstance(prompt, str) and bool(prompt.strip()), "prompt", prompt, "a text")
    template = getattr(tokenizer, "chat_template", None)
    _check.require(bool(template), "tokenizer", type(tokenizer).__name__, "a tokenizer with a chat template")
    turns = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    return encoded["input_ids"]


def repeated_share(ids: list[int], prompt: int, *, of_prompt: bool = False, ngram: int = 3) -> float:
    """The share of `ids[prompt:]` that end an n-gram which came before; `of_prompt`: which stands in the prompt whole.

    An n-gram that reaches back into the prompt counts too. Errors: ValueError for an answer of no token.
    """
    _check.integer("prompt", prompt, 0, len(ids) - 1)
    _check.integer("ngram", ngram, 1)
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for end in range(ngram, len(ids) + 1):
        gram = tuple(ids[end - ngram : end])
        hits += end > prompt and gram in seen
        if end <= prompt or not of_prompt:
            seen.add(gram)
    return hits / (len(ids) - prompt)
