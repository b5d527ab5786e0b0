"""Generation with a cache and without: the same tokens, and how long either takes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.measure import device_lock, synchronize
from labkit.models import LoadedModel, plain_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Generation:
    """Seconds that `transformers.generate` took for `new_tokens` after `prompt_length`, with a cache and without."""

    prompt_length: int
    new_tokens: int
    with_cache_s: float
    without_cache_s: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes without."""
        return self.without_cache_s / self.with_cache_s


def time_generation(
    model: PreTrainedModel | LoadedModel, prompt: torch.Tensor, new_tokens: int, *, repeats: int = 1
) -> Generation:
    """Greedy generation of exactly `new_tokens` after `prompt (1, prompt_length)`, with a cache and without, in turns;
    the median of `repeats` each, after one short call of both. Errors: RuntimeError where the two differ in a token."""
    model = plain_model(model)
    _check.tensor("prompt", prompt, ndim=2)
    _check.integer("new_tokens", new_tokens, 1)
    _check.integer("repeats", repeats, 1)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with device_lock(model.device):
        for turn in range(repeats + 1):
            made = {use_cache: _timed(model, prompt, new_tokens if turn else 1, use_cache) for use_cache in seconds}
            if not torch.equal(made[True][0], made[False][0]):
                raise RuntimeError("generation with a cache gave other tokens than without")
            for use_cache, (_, took) in made.items() if turn else ():
                seconds[use_cache].append(took)
    medians = (sorted(seconds[use_cache])[repeats // 2] for use_cache in (True, False))
    return Generation(prompt.shape[1], new_tokens, *medians)


def _timed(model: PreTrainedModel, prompt: torch.Tensor, new: int, use_cache: bool) -> tuple[torch.Tensor, float]:
    synchronize(model.device)
    begin = time.perf_counter()
    ids = model.generate(
        prompt.to(model.device),
        attention_mask=torch.ones_like(prompt, device=model.device),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )
    synchronize(model.device)
    return ids, time.perf_counter() - begin
