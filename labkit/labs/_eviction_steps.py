"""The steps that `eviction_lab` runs: a prompt through a cache that forgets, and what is left of it. No widgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
from transformers import Cache, DynamicCache

from labkit.kv_cache import HeavyHitterCache, SinkCache, SnapKVCache, bytes_per_token
from labkit.kv_cache.eviction import eviction_cache, prompt_budget
from labkit.kv_cache.memory import cache_nbytes
from labkit.kv_cache.needle import NeedlePrompt, find_needles
from labkit.labs._eviction_result import BUDGETS, Kept, Span
from labkit.models import LoadedModel

# What SnapKV keeps at least: its eight voters and one token that they vote for.
_LEAST = 9

T = TypeVar("T")


class Remembered(Generic[T]):
    """A stream whose items are computed once each, as they are asked for; `is_last` says which one ends it, so that
    what the stream holds, such as a cache, can go."""

    def __init__(self, make: Callable[[], Iterator[T]], is_last: Callable[[T], bool]) -> None:
        self._make, self._is_last = make, is_last
        self._stream: Iterator[T] | None = None
        self._items: list[T] = []

    def __getitem__(self, index: int) -> T:
        try:
            while len(self._items) <= index:
                self._stream = self._stream or self._make()
                self._items.append(next(self._stream))
                if self._is_last(self._items[-1]):
                    self._stream = None
        except BaseException:
            # A generator that raised has ended: whoever asks next starts it again.
            self._stream, self._items = None, []
            raise
        return self._items[index]


def snapkv_prompt(context_length: int) -> int:
    """How much of a window goes in at once: as many tokens follow as the smallest budget has room for."""
    after = max(round(min(BUDGETS) * context_length) - _LEAST, 1)
    return context_length - 1 - after


def is_found(loaded: LoadedModel, prompt: NeedlePrompt, method: str, budget: float) -> bool:
    """Whether the model says the needle's number when it reads through this cache."""
    cache = eviction_cache(loaded, method, prompt_budget(prompt, budget))
    return find_needles(loaded, [prompt], cache).found == 1


@torch.no_grad()
def look(loaded: LoadedModel, prompt: NeedlePrompt, method: str, budget: float) -> Kept:
    """One prompt through one cache: which of its tokens are held, in how many bytes, and what the model then says."""
    model, ids = loaded.model, prompt.input_ids.to(loaded.model.device)
    cache = eviction_cache(model, method, prompt_budget(prompt, budget))()
    model.base_model(input_ids=ids[None, :-1], past_key_values=cache, use_cache=True)
    seen, token_bytes = len(ids) - 1, bytes_per_token(model.config, model.dtype)
    needle, digits, question = _spans(prompt)
    held, nbytes = cache.layers[0].keys.shape[2], cache_nbytes(cache)
    positions = kept_positions(cache, seen)
    # Last: the answer's own tokens go into the cache.
    said = _continued(loaded, cache, ids[-1:], len(prompt.answer_ids))
    return Kept(
        heads=tuple(tuple(p.flatten().bincount(minlength=seen).tolist()) for p in positions),
        tokens=tuple(loaded.tokenizer.decode([i]) for i in prompt.input_ids[:-1].tolist()),
        num_key_value_heads=model.config.num_key_value_heads,
        needle=needle,
        digits=digits,
        question=question,
        held=held,
        nbytes=nbytes,
        predicted=_predicted_bytes(cache, seen, token_bytes, model.dtype),
        full_bytes=seen * token_bytes,
        kv_bytes=held * token_bytes,
        answer=loaded.tokenizer.decode(prompt.answer_ids.tolist()).strip(),
        said=loaded.tokenizer.decode(said).strip(),
        found=said == prompt.answer_ids.tolist(),
    )


def kept_positions(cache: Cache, seen: int) -> list[torch.Tensor]:
    """By layer, where in the text the tokens held stand: `(num_key_value_heads, held)` int64. One row."""
    if isinstance(cache, HeavyHitterCache | SnapKVCache):
        return [cache.positions(i)[0].long().cpu() for i in range(len(cache.layers))]
    heads, held = cache.layers[0].keys.shape[1:3]
    sinks = min(cache.num_sink_tokens, held) if isinstance(cache, SinkCache) else 0
    at = torch.cat((torch.arange(sinks), torch.arange(seen - (held - sinks), seen)))
    return [at.expand(heads, held)] * len(cache.layers)


def _predicted_bytes(cache: Cache, seen: int, token_bytes: int, dtype: torch.dtype) -> int:
    """By the cache's own formula."""
    if isinstance(cache, DynamicCache):
        return seen * token_bytes
    prompt = {"prompt_length": seen} if isinstance(cache, SnapKVCache) else {}
    return cache.bytes_at(seen, dtype=dtype, **prompt)


def _continued(loaded: LoadedModel, cache: Cache, token: torch.Tensor, count: int) -> list[int]:
    """The `count` tokens that the model goes on with after `token (1,)`, each the likeliest."""
    model, said = loaded.model, []
    for _ in range(count):
        out = model.base_model(input_ids=token[None], past_key_values=cache, use_cache=True)
        token = model.get_output_embeddings()(out.last_hidden_state[0, -1:]).argmax(-1)
        said.append(int(token))
    return said


def _spans(prompt: NeedlePrompt) -> tuple[Span, Span, Span]:
    """The needle, its number, and the question; which repeats the needle's words up to the number, and whose last
    token is still to come."""
    ids, answer, start = prompt.input_ids.tolist(), prompt.answer_ids.tolist(), prompt.fact_at
    # The needle's words are as many as stand before its number and again at the end.
    words = next(
        n for n in range(1, len(ids)) if ids[start + n :][: len(answer)] == answer and ids[start:][:n] == ids[-n:]
    )
    digits = Span(start + words, start + words + len(answer))
    return Span(start, digits.end + 1), digits, Span(len(ids) - words, len(ids) - 1)
