"""What a cache of a given size still knows: perplexity and needles found, by method and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor
from transformers import Cache, DynamicCache

from labkit import _check
from labkit.kv_cache.evaluation import cached_perplexity_stream
from labkit.kv_cache.heavy_hitters import HeavyHitterCache
from labkit.kv_cache.memory import cache_nbytes
from labkit.kv_cache.needle import NeedlePrompt, find_needles, needle_prompts
from labkit.kv_cache.sinks import SinkCache
from labkit.kv_cache.snapkv import SnapKVCache
from labkit.models import LoadedModel, plain_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EVICTION_METHODS = ("full", "window", "sinks", "heavy_hitters", "snapkv")
# SnapKV's voters: a question of a dozen tokens at a budget of a few dozen; the paper's 32 would vote for the text too.
_SNAPKV_WINDOW = 8


@dataclass(frozen=True)
class EvictionPoint:
    """One method at one budget, as far as it has been measured.

    budget: share of the tokens that are held. perplexity: of the `scored` tokens so far; None before the first, and
    for "snapkv" without a prompt. needles_found of needles_tried. nbytes: most bytes held after a step of the
    perplexity run, so far.
    """

    method: str
    budget: float
    perplexity: float | None = None
    scored: int = 0
    needles_found: int = 0
    needles_tried: int = 0
    nbytes: int = 0


def eviction_cache(model: PreTrainedModel | LoadedModel, method: str, n_tokens: int) -> Callable[[], Cache]:
    """A function that makes an empty cache of `n_tokens` a KV head for `model`; "full" holds whatever comes.

    method: "full", "window" (the latest tokens), "sinks" (the first four and the latest), "heavy_hitters", "snapkv".
    """
    _check.choice("method", method, EVICTION_METHODS)
    model = plain_model(model)
    _check.integer("n_tokens", n_tokens, {"sinks": 5, "snapkv": _SNAPKV_WINDOW}.get(method, 1))
    return {
        "full": DynamicCache,
        "window": lambda: SinkCache(model.config, window_length=n_tokens, num_sink_tokens=0),
        "sinks": lambda: SinkCache(model.config, window_length=n_tokens, num_sink_tokens=4),
        "heavy_hitters": lambda: HeavyHitterCache(model, budget=n_tokens),
        "snapkv": lambda: SnapKVCache(model, budget=n_tokens, window=_SNAPKV_WINDOW),
    }[method]


def eviction_point(
    model: PreTrainedModel | LoadedModel,
    tokenizer: PreTrainedTokenizerBase | LoadedModel,
    method: str,
    budget: float,
    token_ids: Tensor,
    *,
    context_length: int = 1024,
    chunk: int = 32,
    prompt_length: int = 0,
    n_needles: int = 10,
    needle_length: int = 256,
    seed: int = 0,
) -> Iterator[EvictionPoint]:
    """Measures one method at one budget, and yields what is known after every chunk and every needle.

    budget: share of the tokens that the cache may hold, above 0 and at most 1: of context_length for the perplexity of
    `token_ids`, and of each needle's prompt (`prompt_budget`). Perplexity is `cached_perplexity`'s, with its chunk and
    prompt_length; needles are `needle_prompts(tokenizer, n=n_needles, context_length=needle_length, seed=seed)`, each
    in one step.
    "snapkv" compresses a prompt, so that without a prompt_length its perplexity is not measured; with one, its budget
    counts what is held at the end, the tokens after the prompt included.
    n_needles: 0 for none. Errors: ValueError at the call, also for a budget too small for the method.
    """
    _check.choice("method", method, EVICTION_METHODS)
    _check.number("budget", budget, 0, 1)
    _check.require(budget > 0, "budget", budget, "a share above 0 and at most 1")
    _check.integer("n_needles", n_needles, 0)
    point = EvictionPoint(method, budget)
    run = None
    if method != "snapkv" or prompt_length:
        after = context_length - 1 - prompt_length if method == "snapkv" else 0
        making = _Making(eviction_cache(model, method, round(budget * context_length) - after))
        losses = cached_perplexity_stream(
            model, token_ids, context_length, making, chunk=chunk, prompt_length=prompt_length
        )
        run = losses, making
    prompts = []
    if n_needles:
        prompts = needle_prompts(tokenizer, n=n_needles, context_length=needle_length, seed=seed)
    needles = [(prompt, eviction_cache(model, method, prompt_budget(prompt, budget))) for prompt in prompts]
    return _measured(model, point, run, needles)


def prompt_budget(prompt: NeedlePrompt, budget: float) -> int:
    """Tokens a KV head for this share of the prompt; at 1 there is room for the answer too, so that nothing goes."""
    length = len(prompt.input_ids)
    return length + len(prompt.answer_ids) if budget == 1 else round(budget * length)


class _Making:
    """Makes caches, and knows the last one."""

    def __init__(self, make_cache: Callable[[], Cache]) -> None:
        self._make, self.last = make_cache, None

    def __call__(self) -> Cache:
        self.last = self._make()
        return self.last


def _measured(
    model: PreTrainedModel | LoadedModel,
    point: EvictionPoint,
    run: tuple | None,
    needles: list[tuple[NeedlePrompt, Callable[[], Cache]]],
) -> Iterator[EvictionPoint]:
    if run is not None:
        for scored, value in run[0]:
            held = max(point.nbytes, cache_nbytes(run[1].last))
            point = replace(point, perplexity=value, scored=scored, nbytes=held)
            yield point
    for tried, (prompt, make_cache) in enumerate(needles, 1):
        found = point.needles_found + find_needles(model, [prompt], make_cache).found
        point = replace(point, needles_found=found, needles_tried=tried)
        yield point
