"""The token ids that `stack_lab` continues, and those that it judges a set by. No widgets here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from labkit.corpora import load_text
from labkit.models import LoadedModel
from labkit.speculative.prompts import prompt_ids, typical_prompt

# Of a long prompt, its question and the chat's own marks included.
_LONG = 512
_WINDOWS, _CONTEXT = 3, 256
_QUESTION = "Say in a few sentences what this text is about.\n\n"


@dataclass(frozen=True)
class Texts:
    """Token ids: prompts `(1, n)` by kind; `evaluation (n_windows, context_length)`, which no prompt holds."""

    prompts: Mapping[str, torch.Tensor]
    evaluation: torch.Tensor


def read_texts(loaded: LoadedModel) -> Texts:
    """Errors: ValueError for a tokenizer without a chat template."""
    tokenizer = loaded.tokenizer
    longest = min(_LONG, loaded.model.config.max_position_embeddings // 2)
    chat = prompt_ids(tokenizer, typical_prompt())
    # As many tokens of the text as leave room for the rest of the turn.
    marks = prompt_ids(tokenizer, _QUESTION).shape[1]
    ids = tokenizer(load_text(split="calibration"), add_special_tokens=False, verbose=False).input_ids
    text = tokenizer.decode(ids[: longest - marks])
    ids = tokenizer(load_text(), add_special_tokens=False, verbose=False).input_ids
    context = min(_CONTEXT, loaded.model.config.max_position_embeddings)
    windows = torch.tensor(ids[: _WINDOWS * context]).view(_WINDOWS, context)
    return Texts({"chat": chat, "long": prompt_ids(tokenizer, _QUESTION + text)}, windows)
