"""`Stack`: one model with some rungs on, ready to generate, to be weighed and to be judged."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers.generation.streamers import BaseStreamer

from labkit import _check
from labkit.engine.arguments import check_tokens
from labkit.engine.cache import StaticKVCache
from labkit.engine.decode import Decoder
from labkit.engine.ladder.attention import StandardAttentionCache
from labkit.engine.ladder.rungs import check_rungs, refusals
from labkit.engine.ladder.weights import StackModels, WeightForm
from labkit.kv_cache import QuantizedCache
from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.interface import DecoderCache
from labkit.kv_cache.sizing import bits_per_value, bytes_per_token, quantized_cache_bytes
from labkit.measure import peak_memory, synchronize
from labkit.quality import perplexity
from labkit.quantization import weight_bytes
from labkit.quantization.packing import read_bytes
from labkit.sizing import LlamaShape
from labkit.speculative import generate
from labkit.speculative.interface import Proposer
from labkit.speculative.stats import SpeculativeStats

# 8 bits cost next to nothing (chapter 03); groups of 32 tokens or channels, as there.
_KV_BITS, _KV_GROUP, _KV_RESIDUAL = 8, 32, 32


@dataclass(frozen=True)
class StackRun:
    """One generation: `sequences (1, prompt + new)`, seconds to the first token and a token after it, and what
    speculation counted."""

    sequences: torch.Tensor
    ttft_s: float
    tpot_s: float
    stats: SpeculativeStats | None = None


class _Clock(BaseStreamer):
    """When each token came, as `transformers.generate` hands them out; the prompt comes first."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        synchronize(self.device)
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left over."""


class Stack:
    """`models` with `rungs` on. Without the rung "step" it is `transformers.generate` that decodes.

    proposer: what drafts where "speculation" is on, `num_assistant_tokens` a call. Greedy throughout.
    Errors: ValueError for rungs that do not go together, with the reason.
    """

    def __init__(
        self,
        models: StackModels,
        rungs: Iterable[str] = (),
        *,
        proposer: Proposer | None = None,
        num_assistant_tokens: int = 2,
    ) -> None:
        self.models, self.rungs = models, check_rungs("rungs", rungs)
        self.on = frozenset(self.rungs)
        # One of its own: what a drafter makes ready for one target it would make again at every change of targets.
        self.proposer, self.gamma = copy.copy(proposer), _check.integer("num_assistant_tokens", num_assistant_tokens, 1)
        base = models.loaded.dtype
        refused = refusals(self.rungs, device=models.device, dtype=base, has_proposer=proposer is not None)
        for rung, reason in refused.items():
            _check.require(False, "rungs", self.rungs, f"rungs that go together; {rung!r} cannot go on: {reason}")
        self.form = WeightForm.of(self.rungs, base)
        self.dtype = self.form.dtype
        self._decoder: Decoder | None = None

    @property
    def quality_key(self) -> tuple[object, ...]:
        """Stacks with the same key say the same: what decides is the weights and what the cache keeps."""
        return self.form, "quantized_kv" in self.on

    @property
    def model(self) -> torch.nn.Module:
        """The weights, with the attention that the rungs say where `transformers` decodes."""
        model = self.models.model(self.form)
        if "step" not in self.on:
            model.set_attn_implementation("sdpa" if "attention" in self.on else "eager")
        return model

    @property
    def decoder(self) -> Decoder:
        """What decodes where "step" is on; its cache stays from one generation to the next."""
        if self._decoder is None:
            self._decoder = Decoder(self.model, cache=self._cache())
        return self._decoder

    @property
    def _kv(self) -> dict[str, int]:
        """How a quantized cache is cut."""
        group = math.gcd(_KV_GROUP, LlamaShape.of(self.model.config).head_dim)
        return {"nbits": _KV_BITS, "q_group_size": group, "residual_length": _KV_RESIDUAL}

    def _cache(self) -> DecoderCache | None:
        if "quantized_kv" in self.on:
            return QuantizedCache(self.model.config, **self._kv)
        kind = StaticKVCache if "attention" in self.on else StandardAttentionCache
        # Grown by whole blocks as the Decoder needs it.
        return kind(self.model.config, 1, 1, dtype=self.dtype, device=self.models.device)

    def generate(self, input_ids: torch.Tensor, *, max_new_tokens: int) -> StackRun:
        """Exactly `max_new_tokens` after `input_ids (1, prompt)`, with the times."""
        config = self.model.config
        input_ids = check_tokens("input_ids", input_ids, config.vocab_size, self.models.device)
        room = config.max_position_embeddings - input_ids.shape[1]
        _check.integer("max_new_tokens", max_new_tokens, 1, max(1, room))
        if "step" not in self.on:
            return self._by_transformers(input_ids, max_new_tokens)
        if "speculation" in self.on:
            options = {"max_new_tokens": max_new_tokens, "num_assistant_tokens": self.gamma}
            out = generate(self.decoder, input_ids, self.proposer, **options)
            return StackRun(out.sequences, out.ttft_s, out.tpot_s, out.stats)
        out = self.decoder.generate(input_ids, max_new_tokens=max_new_tokens)
        return StackRun(out.sequences, out.ttft_s, out.tpot_s)

    def _by_transformers(self, input_ids: torch.Tensor, max_new_tokens: int) -> StackRun:
        clock, model = _Clock(self.models.device), self.model
        cache = {"past_key_values": self._cache()} if "quantized_kv" in self.on else {}
        plain = {"do_sample": False, "num_beams": 1, "pad_token_id": 0, "max_new_tokens": max_new_tokens}
        mask = torch.ones_like(input_ids)
        synchronize(self.models.device)
        begin = time.perf_counter()
        sequences = model.generate(input_ids, attention_mask=mask, streamer=clock, **plain, **cache)
        _, first, *later = clock.times
        tpot = (later[-1] - first) / len(later) if later else float("nan")
        return StackRun(sequences, first - begin, tpot)

    @property
    def weight_bytes(self) -> int:
        """Of all weights, as they lie in memory."""
        return weight_bytes(self.model)

    @property
    def kv_bytes(self) -> float:
        """Of one token's keys and values, as they lie in the cache once they have settled."""
        full = bytes_per_token(self.model.config, self.dtype)
        if "quantized_kv" not in self.on:
            return float(full)
        kv = self._kv
        return full * bits_per_value(kv["nbits"], kv["q_group_size"]) / (8 * self.dtype.itemsize)

    def step_bytes(self, kv_len: int) -> int:
        """The least that a decode step over `kv_len` tokens must read: its weights, and the keys and values."""
        config = self.model.config
        cached = bytes_per_token(config, self.dtype) * kv_len
        if "quantized_kv" in self.on:
            cached = quantized_cache_bytes(config, 1, kv_len, self.dtype, **self._kv)
        return read_bytes(self.model) + cached

    def peak_bytes(self, input_ids: torch.Tensor, *, max_new_tokens: int) -> int:
        """Weights, and the most that a generation after `input_ids` takes on top: cache, activations, scores."""
        # What is made at a first call and stays is not the run's; the cache and the graphs are, so they go before.
        self.generate(input_ids, max_new_tokens=max_new_tokens)
        self._decoder = None
        run = functools.partial(self.generate, input_ids, max_new_tokens=max_new_tokens)
        return self.weight_bytes + peak_memory(run, device=self.models.device)

    def perplexity(self, token_ids: torch.Tensor, context_length: int) -> float:
        """Of the stack's weights and of its cache: what attention, step and speculation leave as it is does not count.

        `token_ids` and windows as `labkit.quality.perplexity` takes them.
        """
        model = self.models.model(self.form)
        if "quantized_kv" not in self.on:
            return perplexity(model, token_ids, context_length)
        return cached_perplexity(model, token_ids, context_length, lambda: QuantizedCache(model.config, **self._kv))
