"""What `kv_cache_lab` measures: a cache's bytes, the time to attend to it, perplexity through it. No widgets here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from transformers import Cache, DynamicCache

from labkit.attention import MergeStudy, recorded_merge_study
from labkit.hardware import describe, measure_ceilings
from labkit.kv_cache import QuantizedCache
from labkit.kv_cache.evaluation import cached_perplexity_stream
from labkit.labs._kv_cache_result import FULL, KVCacheParams, KVCacheResult, Quality
from labkit.labs._kv_cache_steps import (
    Held,
    config_with,
    hold,
    layers_to_hold,
    measure_attention,
    predicted_bytes,
    refuse_if_too_large,
    sizes_of,
)
from labkit.labs._quantization_models import load_once
from labkit.labs._quantization_text import prepare
from labkit.labs._result import Progress
from labkit.models import LoadedModel

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | KVCacheResult]

_CHUNK = 32
# Attention this much faster than the ceiling allows shows that the ceiling stands too low.
_BEATEN = 1.05
# Timing goes round data larger than four times the last cache; a quarter of the free memory is its most.
_COLD, _SHARE = 4, 0.25
_UNKNOWN_CACHE = 2**25


class KVCacheCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and KVCacheResult, each fuller than the one
    before: bytes, time, perplexity.

    `model` is a name for `load_model` or a loaded model. What does not hang on the setting is measured once and kept:
    the bandwidth, and the perplexity of each number of bits, which no length of the cache changes.
    """

    def __init__(
        self, model: str | LoadedModel, device: torch.device, *, free_bytes: Callable[[], int] | None = None
    ) -> None:
        self._given, self._device = model, device
        self._free_bytes = free_bytes or (lambda: describe(device).free_bytes)
        self._loaded: LoadedModel | None = None
        self._window: torch.Tensor | None = None
        self._full_stream: Iterator[tuple[int, float]] | None = None
        self._full: list[tuple[int, float]] = []
        self._qualities: dict[tuple[int, int, int], Quality] = {}
        self._bandwidth = 0.0
        self._second_looks = 2

    def __call__(self, params: KVCacheParams, cancelled: Cancelled) -> Steps:
        if self._loaded is None:
            yield Progress(f"Loading {params.model}", 0.02)
            self._loaded = load_once(self._given, self._device) if isinstance(self._given, str) else self._given
        yield Progress(f"Filling a cache of {params.seq_len:,} tokens", 0.1)
        if cancelled():
            return
        held, found = self._start(params)
        yield found
        if cancelled():
            return
        for step in self._speed(params, held, found):
            found = step if isinstance(step, KVCacheResult) else found
            yield step
        del held
        if not cancelled():
            yield from self._quality(params, found, cancelled)

    @property
    def _config(self) -> object:
        return self._loaded.model.config

    @property
    def _dtype(self) -> torch.dtype:
        """What 16 bits are: the model's dtype, and bfloat16 for a float32 model."""
        dtype = self._loaded.model.dtype
        return dtype if dtype.itemsize == 2 else torch.bfloat16

    def _start(self, params: KVCacheParams) -> tuple[Held, KVCacheResult]:
        """The cache for real, and what is known once it stands."""
        config, dtype, free = self._config, self._dtype, self._free_bytes()
        refuse_if_too_large(config, params, dtype, free)
        predicted = predicted_bytes(config_with(config, params.num_key_value_heads), params, dtype)
        layers = layers_to_hold(predicted, config.num_hidden_layers, self._device, free)
        held = hold(config, params, dtype, self._device, layers)
        merged, why_not = self._recorded(params)
        found = KVCacheResult(
            params=params,
            own_heads=config.num_key_value_heads,
            device=str(self._device),
            dtype=str(dtype).removeprefix("torch."),
            model_dtype=str(self._loaded.model.dtype).removeprefix("torch."),
            positions=config.max_position_embeddings,
            sizes=sizes_of(config, params, dtype, held, free),
            merged=merged,
            not_recorded=why_not,
        )
        return held, found

    def _recorded(self, params: KVCacheParams) -> tuple[MergeStudy | None, str]:
        """What merging the model's heads to this many cost, from an earlier run."""
        if params.num_key_value_heads == self._config.num_key_value_heads:
            return None, ""
        try:
            study = recorded_merge_study()
        except OSError:
            return None, "no run is kept"
        if (study.model, study.num_key_value_heads) == (params.model, params.num_key_value_heads):
            return study, ""
        return None, f"for {params.model} with {params.num_key_value_heads} KV heads"

    def _speed(self, params: KVCacheParams, held: Held, found: KVCacheResult) -> Steps:
        if not self._bandwidth:
            yield Progress("Measuring this machine's memory bandwidth (about 2 s, once)", 0.3)
            self._raise_bandwidth()
        yield Progress("One layer's decode attention", 0.4)
        cache = describe(self._device).cache_bytes or _UNKNOWN_CACHE
        cold = int(min(_COLD * cache + 1, _SHARE * found.sizes.free))
        speed = measure_attention(self._config, params, held, self._dtype, self._bandwidth, cold)
        if self._second_looks and speed.fraction > _BEATEN:
            self._second_looks -= 1
            yield Progress("Attention beat the bandwidth, which was measured too low: measuring it again", 0.45)
            self._raise_bandwidth(refresh=True)
        yield dataclasses.replace(found, speed=dataclasses.replace(speed, bandwidth=self._bandwidth))

    def _raise_bandwidth(self, refresh: bool = False) -> None:
        """The highest so far: what a busy neighbour took away was there all the same."""
        self._bandwidth = max(self._bandwidth, measure_ceilings(self._device, refresh=refresh).read_bandwidth)

    def _quality(self, params: KVCacheParams, found: KVCacheResult, cancelled: Cancelled) -> Steps:
        """Perplexity through the cache, chunk by chunk beside that through one in full precision."""
        if params.num_key_value_heads != found.own_heads:
            return
        key = (params.bits, params.q_group_size, params.residual_length)
        if key not in self._qualities:
            for step in self._stream(params, cancelled):
                if isinstance(step, Progress):
                    yield step
                    continue
                if step.firm:
                    self._qualities[key] = step
                yield dataclasses.replace(found, quality=step)
        else:
            yield dataclasses.replace(found, quality=self._qualities[key])

    def _stream(self, params: KVCacheParams, cancelled: Cancelled) -> Iterator[Progress | Quality]:
        if self._window is None:
            texts = prepare(self._loaded, None)
            self._window = texts.evaluation[: texts.context_length]
        tokens = len(self._window) - 1
        stream = self._perplexities(params) if params.quantized else None
        for i in range(-(-tokens // _CHUNK)):
            done = i * _CHUNK
            yield Progress(f"Perplexity: {done} of {tokens} tokens", 0.5 + 0.5 * done / tokens)
            if cancelled():
                return
            scored, perplexity = self._full_at(params, i) if stream is None else next(stream)
            if cancelled():
                return
            yield Quality(perplexity, self._full_at(params, i)[1], scored, tokens)

    def _perplexities(self, params: KVCacheParams) -> Iterator[tuple[int, float]]:
        model = self._loaded.model

        def make() -> Cache:
            if not params.quantized:
                return DynamicCache(config=model.config)
            return QuantizedCache(model.config, params.bits, params.q_group_size, params.residual_length)

        return cached_perplexity_stream(model, self._window, len(self._window), make, chunk=_CHUNK)

    def _full_at(self, params: KVCacheParams, chunk: int) -> tuple[int, float]:
        """Tokens scored and perplexity up to this chunk in full precision; each chunk is run once."""
        if self._full_stream is None:
            self._full_stream = self._perplexities(dataclasses.replace(params, bits=FULL))
        try:
            while len(self._full) <= chunk:
                self._full.append(next(self._full_stream))
        except BaseException:
            # A generator that raised has ended: the next setting starts it again.
            self._full_stream, self._full = None, []
            raise
        return self._full[chunk]
