"""What `eviction_lab` measures: what a cache kept of a prompt, needles found, perplexity. No widgets here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from labkit.kv_cache.eviction import EvictionPoint, eviction_point
from labkit.kv_cache.needle import NeedlePrompt, needle_prompts
from labkit.labs._eviction_result import DEPTHS, FULL, EvictionParams, EvictionResult, Needles, Quality
from labkit.labs._eviction_steps import Remembered, is_found, look, snapkv_prompt
from labkit.labs._quantization_models import load_once
from labkit.labs._quantization_text import prepare
from labkit.labs._result import Progress
from labkit.models import LoadedModel

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | EvictionResult]
Key = tuple[str, float]

_CHUNK = 32
# SnapKV is scored on the end of each window alone: more windows for it.
_WINDOWS, _SNAPKV_WINDOWS = 1, 4


class EvictionCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and EvictionResult, each fuller than the one
    before: what was kept, needles, perplexity.

    `model` is a name for `load_model` or a loaded model. Needles and perplexity hang on method and budget alone: each
    prompt and each window is run once for those, and all tokens' beside them once.
    """

    def __init__(
        self, model: str | LoadedModel, device: torch.device, *, n_needles: int = 10, needle_length: int = 256
    ) -> None:
        self._given, self._device = model, device
        self._n_needles, self._needle_length = n_needles, needle_length
        self._loaded: LoadedModel | None = None
        self._prompts: list[NeedlePrompt] = []
        self._windows: torch.Tensor | None = None
        self._found: dict[Key, list[bool]] = {}
        self._points: dict[tuple[Key, int], Remembered[EvictionPoint]] = {}

    def __call__(self, params: EvictionParams, cancelled: Cancelled) -> Steps:
        if not self._prompts:
            yield Progress(f"Loading {params.model}", 0.02)
            self._prepare()
        yield Progress("A prompt through the cache", 0.05)
        if cancelled():
            return
        found = self._start(params)
        yield found
        for part in (self._needles, self._quality):
            for step in part(params, found, cancelled):
                found = step if isinstance(step, EvictionResult) else found
                yield step
            if cancelled():
                return

    def _prepare(self) -> None:
        self._loaded = load_once(self._given, self._device) if isinstance(self._given, str) else self._given
        texts = prepare(self._loaded, None)
        self._windows = texts.evaluation.view(-1, texts.context_length)
        length = self._needle_length
        self._prompts = needle_prompts(self._loaded, n=self._n_needles, context_length=length, depths=DEPTHS)

    def _start(self, params: EvictionParams) -> EvictionResult:
        prompt = next(p for p in self._prompts if p.depth == params.depth)
        return EvictionResult(
            params=params,
            device=str(self._device),
            dtype=str(self._loaded.model.dtype).removeprefix("torch."),
            kept=look(self._loaded, prompt, params.method, params.budget),
            depths=tuple(p.depth for p in self._prompts),
        )

    def _needles(self, params: EvictionParams, found: EvictionResult, cancelled: Cancelled) -> Steps:
        """This setting's prompt by prompt, then all tokens', once."""
        key, full = (params.method, params.held), (FULL, 1.0)
        total = len(self._prompts)
        for which in dict.fromkeys((key, full)):
            start, done = 0.1 if which == key else 0.4, self._found.setdefault(which, [])
            while len(done) < total:
                whose = " with all tokens (once)" if which == full else ""
                yield Progress(f"Needle {len(done) + 1} of {total}{whose}", start + 0.3 * len(done) / total)
                if cancelled():
                    return
                done.append(is_found(self._loaded, self._prompts[len(done)], *which))
                found = self._with_needles(found, key, full)
                yield found
        yield self._with_needles(found, key, full)

    def _with_needles(self, found: EvictionResult, key: Key, full: Key) -> EvictionResult:
        mine, all_tokens = (
            Needles(tuple(self._found[which]), len(self._prompts)) if self._found.get(which) else None
            for which in (key, full)
        )
        return dataclasses.replace(found, needles=mine, full_needles=all_tokens)

    def _quality(self, params: EvictionParams, found: EvictionResult, cancelled: Cancelled) -> Steps:
        """Perplexity through the cache, step by step beside that through one of all tokens."""
        context = self._windows.shape[1]
        prompt, windows = 0, self._windows[:_WINDOWS]
        if params.method == "snapkv":
            prompt, windows = snapkv_prompt(context), self._windows[:_SNAPKV_WINDOWS]
        of = len(windows) * (context - max(prompt, 1))
        keys = ((params.method, params.held), (FULL, 1.0))
        mine, full = (self._stream(key, windows, prompt, of) for key in keys)
        scored, index = 0, 0
        while scored < of:
            yield Progress(f"Perplexity: {scored} of {of} tokens", 0.7 + 0.3 * scored / of)
            if cancelled():
                return
            baseline = full[index]
            if cancelled():
                return
            point = mine[index]
            scored, index = point.scored, index + 1
            quality = Quality(point.perplexity, baseline.perplexity, scored, of, context, prompt)
            yield dataclasses.replace(found, quality=quality)

    def _stream(self, key: Key, windows: torch.Tensor, prompt_length: int, of: int) -> Remembered[EvictionPoint]:
        method, budget = key

        def points() -> Iterator[EvictionPoint]:
            return eviction_point(
                self._loaded,
                self._loaded,
                method,
                budget,
                windows.flatten(),
                context_length=windows.shape[1],
                chunk=_CHUNK,
                prompt_length=prompt_length,
                n_needles=0,
            )

        return self._points.setdefault((key, prompt_length), Remembered(points, lambda point: point.scored == of))
