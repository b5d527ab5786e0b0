"""The token ids that `quantization_lab` calibrates on and evaluates. No widgets here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit import _check
from labkit.corpora import SPLITS, load_text, token_batches
from labkit.models import LoadedModel

_WINDOWS, _CONTEXT = 6, 512
_SHORTEST = 32
# The text whose inputs the errors are measured on; the text that a block is calibrated on.
_ERROR_SAMPLES, _ERROR_TOKENS = 2, 128
_BLOCK_SAMPLES, _BLOCK_TOKENS = 8, 256


@dataclass(frozen=True)
class Texts:
    """Token ids: `evaluation (n_tokens,)` in windows of `context_length`; `errors (n, seq_len)`, the start of it."""

    evaluation: torch.Tensor
    context_length: int
    errors: torch.Tensor

    @property
    def windows(self) -> int:
        return len(self.evaluation) // self.context_length


def read_own(text: str | Path | None) -> str | None:
    """The learner's text: a string, or a whole UTF-8 file by its path; None for the course's."""
    if text is None:
        return None
    _check.require(isinstance(text, str | Path), "text", type(text).__name__, "a path, a string, or None")
    if os.path.isfile(text):  # pathlib raises for a name that is too long
        return "\n\n".join(load_text(text, split) for split in SPLITS)
    _check.require(not isinstance(text, Path), "text", str(text), "the path of a text file")
    return text


def prepare(loaded: LoadedModel, own: str | None) -> Texts:
    """Errors: ValueError for a text too short for one window."""
    tokenizer, config = loaded.tokenizer, loaded.model.config
    _check.require(callable(tokenizer), "model", "a model without a tokenizer", "one with a tokenizer")
    found = tokenizer(load_text() if own is None else own, add_special_tokens=False, verbose=False).input_ids
    ids = torch.tensor(found, dtype=torch.int64)
    takes = f"at least {_SHORTEST} tokens, or the path of a file that exists"
    _check.require(len(ids) >= _SHORTEST, "text", f"{len(ids)} tokens", takes)
    longest = min(_CONTEXT, config.max_position_embeddings)
    context = min(longest, len(ids))
    evaluation = ids[: context * min(_WINDOWS, len(ids) // context)]
    length = min(_ERROR_TOKENS, len(ids) // _ERROR_SAMPLES)
    errors = ids[: _ERROR_SAMPLES * length].view(_ERROR_SAMPLES, length)
    return Texts(evaluation, context, errors)


def calibration_ids(loaded: LoadedModel) -> torch.Tensor:
    """What a block is calibrated on, `(n_samples, seq_len)`: the course's text, whichever is evaluated."""
    length = min(_BLOCK_TOKENS, loaded.model.config.max_position_embeddings)
    return token_batches(loaded.tokenizer, load_text(split="calibration"), _BLOCK_SAMPLES, length, 0)
