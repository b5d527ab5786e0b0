"""What a KV cache weighs, from a model's config: in full precision, and quantized with all that goes with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.sizing import LlamaShape, bits_per_element, kv_bytes_per_token

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NBITS = (8, 4, 2)
SCALE_BITS = 16
# Each layer counts how many tokens of each row are quantized: an int32.
_COUNTER_BYTES = 4


def bytes_per_token(config: PretrainedConfig, dtype: torch.dtype | str) -> int:
    """Bytes of keys and values that one token of one sequence keeps over all layers, in full precision `dtype`.

    2 * num_hidden_layers * num_key_value_heads * head_dim * bytes of `dtype`.
    """
    return kv_bytes_per_token(config, dtype)


def bits_per_value(nbits: int, q_group_size: int) -> float:
    """Bits that one quantized number takes with its share of scale and minimum, 16 bits each: 5 at 4 bits, groups of
    32."""
    _check.integer("nbits", nbits, 1)
    return nbits + 2 * SCALE_BITS / _check.integer("q_group_size", q_group_size, 1)


def quantized_tokens(settled: int, q_group_size: int, residual_length: int) -> int:
    """How many of `settled` tokens lie quantized: whole groups, all of them older than the last `residual_length`."""
    return max(0, settled - residual_length) // q_group_size * q_group_size


def quantized_cache_bytes(
    config: PretrainedConfig,
    batch: int,
    seq_len: int,
    dtype: torch.dtype | str,
    *,
    nbits: int = 4,
    q_group_size: int = 32,
    residual_length: int = 32,
) -> int:
    """Bytes of a `QuantizedCache` that holds `seq_len` tokens of each of `batch` rows, after a prefill or after steps
    of one token: codes, scales and minimums, and the recent tokens in `dtype`. The newest token is never counted as
    settled."""
    shape = LlamaShape.of(config)
    _check.choice("nbits", _check.integer("nbits", nbits), NBITS)
    _check.integer("q_group_size", q_group_size, 1)
    divides = shape.head_dim % q_group_size == 0
    _check.require(divides, "q_group_size", q_group_size, f"a divisor of head_dim, {shape.head_dim}")
    _check.integer("residual_length", residual_length, 0)
    batch, seq_len = _check.integer("batch", batch, 1), _check.integer("seq_len", seq_len, 1)
    quantized = quantized_tokens(seq_len - 1, q_group_size, residual_length)
    numbers = 2 * shape.num_hidden_layers * batch * shape.kv_size
    codes = numbers * quantized * nbits // 8
    grids = 2 * numbers * quantized // q_group_size * SCALE_BITS // 8
    recent = numbers * (seq_len - quantized) * bits_per_element("dtype", dtype) // 8
    return codes + grids + recent + _COUNTER_BYTES * shape.num_hidden_layers * batch * bool(quantized)
