"""The steps that `kv_cache_lab` runs: a cache of random tokens for real, its bytes, and attention to it. No widgets."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

from labkit.engine.cache import StaticKVCache
from labkit.kernels import QuantizedKV, choose_backend, decode_attention
from labkit.kv_cache import QuantizedCache, bytes_per_token, quantized_cache_bytes
from labkit.kv_cache.quantized_layer import QuantizedLayer
from labkit.labs._kv_cache_result import BITS, FULL, SEQ_LENS, KVCacheParams, Sizes, Speed
from labkit.labs._result import si
from labkit.measure import compare_ops
from labkit.sizing import weight_bytes

_HEADROOM = 0.9  # of the memory that is free
# One layer is held as it was drawn, as it is stored, and in the copies that timing goes round.
_TIMES_A_LAYER = 5
# All layers are allocated where they take no more than this and a quarter of what is free: more takes a CPU over 2 s.
_MOST_BYTES = {"cpu": 2**30, "cuda": 2**36}
_SHARE = 0.25
# Each way of timing goes on at least so long.
_MIN_RUN_S = {"cpu": 0.1, "cuda": 0.02}

Pair = tuple[torch.Tensor | QuantizedKV, torch.Tensor | QuantizedKV]


def config_with(config: PretrainedConfig, num_key_value_heads: int, num_layers: int | None = None) -> PretrainedConfig:
    """The same model with other KV heads and, where given, another number of layers."""
    changed = copy.deepcopy(config)
    changed.num_key_value_heads = num_key_value_heads
    changed.num_hidden_layers = num_layers or changed.num_hidden_layers
    return changed


def predicted_bytes(config: PretrainedConfig, params: KVCacheParams, dtype: torch.dtype) -> int:
    """Bytes of the whole cache of one sequence, by the formula; `config` has the setting's heads."""
    if not params.quantized:
        return params.seq_len * bytes_per_token(config, dtype)
    groups = {"q_group_size": params.q_group_size, "residual_length": params.residual_length}
    return quantized_cache_bytes(config, 1, params.seq_len, dtype, nbits=params.bits, **groups)


def refuse_if_too_large(config: PretrainedConfig, params: KVCacheParams, dtype: torch.dtype, free_bytes: int) -> None:
    """ValueError with the bytes and a length that would fit, where not even one layer does."""
    layer = bytes_per_token(config_with(config, params.num_key_value_heads, 1), dtype)

    def fits(seq_len: int) -> bool:
        return _TIMES_A_LAYER * layer * seq_len <= _HEADROOM * free_bytes

    if fits(params.seq_len):
        return
    fitting = max((length for length in SEQ_LENS if fits(length)), default=None)
    heads = params.num_key_value_heads
    raise ValueError(
        f"seq_len: got {params.seq_len} with {heads} KV heads, of which to measure one layer needs "
        f"{si(_TIMES_A_LAYER * layer * params.seq_len, 'B')} where {si(free_bytes, 'B')} are free; takes "
        + (f"at most {fitting}" if fitting else "fewer KV heads")
    )


@dataclass(frozen=True)
class Held:
    """A cache of one sequence with all layers or one, its keys and values random: `pairs` of a layer each, as attention
    reads them, and the bytes of its tensors."""

    pairs: tuple[Pair, ...]
    nbytes: int
    recent_tokens: int

    @property
    def layer_bytes(self) -> int:
        return self.nbytes // len(self.pairs)


def hold(
    config: PretrainedConfig, params: KVCacheParams, dtype: torch.dtype, device: torch.device, num_layers: int
) -> Held:
    """Allocate and fill `num_layers` layers of one cache."""
    drawn = config_with(config, params.num_key_value_heads, 1 if params.quantized else num_layers)
    full = StaticKVCache(drawn, 1, params.seq_len, dtype=dtype, device=device)
    full.fill(params.seq_len)
    if not params.quantized:
        return Held(tuple(zip(full.keys, full.values, strict=True)), full.nbytes, 0)
    config = config_with(config, params.num_key_value_heads, num_layers)
    cache = QuantizedCache(config, params.bits, params.q_group_size, params.residual_length)
    first = cache.layers[0]
    first.append(full.keys[0], full.values[0])
    # What the tokens are changes neither bytes nor times: the other layers copy the first one's.
    cache.layers[1:] = [copy.deepcopy(first) for _ in cache.layers[1:]]
    return Held(tuple(_readable(layer) for layer in cache.layers), cache.nbytes, first.keys.shape[2])


def _readable(layer: QuantizedLayer) -> Pair:
    if layer.old_keys is None:
        return layer.keys, layer.values
    held = ((layer.old_keys, layer.keys), (layer.old_values, layer.values))
    return tuple(replace(old, recent=recent, n_quantized=layer.counts) for old, recent in held)


def layers_to_hold(predicted: int, num_layers: int, device: torch.device, free_bytes: int) -> int:
    """All where that is quick and leaves room; else one, whose bytes say those of the others."""
    return num_layers if predicted <= min(_MOST_BYTES[device.type], _SHARE * free_bytes) else 1


def sizes_of(config: PretrainedConfig, params: KVCacheParams, dtype: torch.dtype, held: Held, free_bytes: int) -> Sizes:
    """What was allocated beside what the formula says; `config` is the model's own."""
    mine = config_with(config, params.num_key_value_heads)
    return Sizes(
        predicted=predicted_bytes(mine, params, dtype),
        allocated=held.nbytes,
        layers_allocated=len(held.pairs),
        num_layers=config.num_hidden_layers,
        recent_tokens=held.recent_tokens,
        full=params.seq_len * bytes_per_token(mine, dtype),
        own=params.seq_len * bytes_per_token(config, dtype),
        weights=weight_bytes(config, dtype),
        free=free_bytes,
        curves={
            bits: {n: predicted_bytes(mine, replace(params, bits=bits, seq_len=n), dtype) for n in SEQ_LENS}
            for bits in BITS
        },
    )


def _copy(pair: Pair) -> Pair:
    keys, values = pair
    if isinstance(keys, torch.Tensor):
        return keys.clone(), values.clone()
    keys, values = keys.map(torch.clone), values.map(torch.clone)
    # Both count their tokens by one tensor, as a cache's keys and values do.
    return keys, replace(values, n_quantized=keys.n_quantized)


def _round(held: Held, least_bytes: int) -> Sequence[Pair]:
    """The layers, and copies of the first until all pass `least_bytes`."""
    missing = -(-least_bytes // held.layer_bytes) - len(held.pairs)
    return [*held.pairs, *(_copy(held.pairs[0]) for _ in range(missing))]


def _attention(pairs: Sequence[Pair], query: torch.Tensor, seq_len: int) -> Callable[[], torch.Tensor]:
    lengths = torch.full((1,), seq_len, dtype=torch.int32, device=query.device)
    turn = itertools.cycle(pairs)
    return lambda: decode_attention(query, *next(turn), lengths)


def measure_attention(
    config: PretrainedConfig, params: KVCacheParams, held: Held, dtype: torch.dtype, bandwidth: float, cold_bytes: int
) -> Speed:
    """One layer's decode attention over `held`, in turn with the same tokens in 16 bits. Each call goes on to other
    memory, until `cold_bytes` have passed, so that no cache of the processor serves it."""
    first = held.pairs[0]
    device = first[0].device
    head_dim = first[0].shape[3]
    query = torch.randn(1, config.num_attention_heads, 1, head_dim, dtype=dtype, device=device)
    full = hold(config, replace(params, bits=FULL), dtype, device, 1) if params.quantized else held
    ops = {"this": _attention(_round(held, cold_bytes), query, params.seq_len)}
    if full is not held:
        ops["full"] = _attention(_round(full, cold_bytes), query, params.seq_len)
    times = compare_ops(ops, device=device, min_run_s=_MIN_RUN_S[device.type], warmup=1)
    choice = choose_backend("decode_attention", query, *first)
    fulls = times.get("full", times["this"]), full.layer_bytes
    return Speed(times["this"], held.layer_bytes, *fulls, choice.name, choice.reason, bandwidth)
