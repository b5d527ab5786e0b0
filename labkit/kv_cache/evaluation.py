"""Perplexity through a cache: each query reads what the cache kept, so that what it forgot shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit import _check
from labkit.models import LoadedModel, plain_model
from labkit.quality import checked_windows, exp_or_inf

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel


def cached_perplexity(
    model: PreTrainedModel | LoadedModel,
    token_ids: Tensor,
    context_length: int,
    make_cache: Callable[[], Cache],
    *,
    chunk: int = 32,
    prompt_length: int = 0,
) -> float:
    """`labkit.quality.perplexity` of a model that reads its past out of a cache.

    token_ids, context_length: windows and scoring as there. Each window goes through the model `chunk` tokens a step
    with a cache of its own from `make_cache`; with `transformers`' DynamicCache this is that perplexity itself.
    prompt_length: the first tokens of each window that go in as one step, and of which only the last one's guess is
    scored: the way to measure a cache that compresses a prompt (SnapKV). 0: every step is a chunk.
    Errors: ValueError for what `perplexity` refuses, for a chunk below one token, a prompt as long as the window, and
    for a cache that comes with tokens in it.
    """
    *_, (_, value) = cached_perplexity_stream(
        model, token_ids, context_length, make_cache, chunk=chunk, prompt_length=prompt_length
    )
    return value


def cached_perplexity_stream(
    model: PreTrainedModel | LoadedModel,
    token_ids: Tensor,
    context_length: int,
    make_cache: Callable[[], Cache],
    *,
    chunk: int = 32,
    prompt_length: int = 0,
) -> Iterator[tuple[int, float]]:
    """As `cached_perplexity`, step by step: yields (tokens scored so far, perplexity of those) after every chunk.

    Arguments are checked at the call, not at the first item.
    """
    model = plain_model(model)
    windows = checked_windows(model, token_ids, context_length)
    _check.require(callable(make_cache), "make_cache", make_cache, "a function without arguments that makes a cache")
    _check.integer("chunk", chunk, 1)
    _check.integer("prompt_length", prompt_length, 0, context_length - 1)
    return _stream(model, windows, make_cache, chunk, prompt_length)


def _stream(
    model: PreTrainedModel, windows: Tensor, make_cache: Callable[[], Cache], chunk: int, prompt_length: int
) -> Iterator[tuple[int, float]]:
    total, scored = 0.0, 0
    for window in windows:
        window = window.to(model.device)
        for losses in _window_losses(model, window, fresh_cache(make_cache), _steps(len(window), chunk, prompt_length)):
            total += losses.sum().item()
            scored += losses.numel()
            yield scored, exp_or_inf(total / scored)


def _steps(context_length: int, chunk: int, prompt_length: int) -> list[tuple[int, int, int]]:
    """(first token, end, first token whose guess is scored) of each step; the window's last token guesses nothing."""
    end = context_length - 1
    steps = [(0, prompt_length, prompt_length - 1)] if prompt_length else []
    return steps + [(start, min(start + chunk, end), start) for start in range(prompt_length, end, chunk)]


def fresh_cache(make_cache: Callable[[], Cache]) -> Cache:
    """A cache that holds nothing yet. Errors: ValueError for one that does, as when `make_cache` returns the same."""
    cache = make_cache()
    usable = hasattr(cache, "update") and hasattr(cache, "get_seq_length")
    _check.require(usable, "make_cache", type(cache).__name__, "a function that makes a Cache of transformers")
    seen = int(cache.get_seq_length())
    takes = "a function that makes a new, empty cache at each call"
    _check.require(seen == 0, "make_cache", f"a cache that holds {seen} tokens", takes)
    return cache


def _window_losses(
    model: PreTrainedModel, window: Tensor, cache: Cache, steps: list[tuple[int, int, int]]
) -> Iterator[Tensor]:
    """Negative log likelihoods, in nats, of the tokens that each step guesses, `(step's scored tokens,)`."""
    head = model.get_output_embeddings()
    for start, end, first in steps:
        # The context ends before each yield: a generator must not leave its caller without gradients.
        with torch.no_grad():
            out = model.base_model(input_ids=window[None, start:end], past_key_values=cache, use_cache=True)
            logits = head(out.last_hidden_state[0, first - start :]).float()
            losses = F.cross_entropy(logits, window[first + 1 : end + 1], reduction="none")
        yield losses
