"""What a Llama-family model weighs, from its config alone: parameters, weights, KV cache, activations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from labkit import _check

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3")
# torch gives its sub-byte dtypes an itemsize of one byte; a packed tensor holds as many bits a value as the name says.
_SUB_BYTE = re.compile(r"torch\.(?:u?int|float)([1-7])(?:_.*)?")


def bits_per_element(name: str, dtype: torch.dtype | str) -> int:
    """Bits of one stored value of `dtype` (a torch dtype or its name); group scales are not in it."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    takes = 'a torch dtype or its name, such as "bfloat16", "int8" or "uint4"'
    _check.require(isinstance(found, torch.dtype), name, dtype, takes)
    packed = _SUB_BYTE.fullmatch(str(found))
    return int(packed[1]) if packed else 8 * found.itemsize


@dataclass(frozen=True)
class LlamaShape:
    """The sizes in a config that its cost depends on, read once and checked.

    Covers `transformers`' llama, qwen2 (biases on q, k and v) and qwen3 (RMS norms over each head of q and k).
    """

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: PretrainedConfig) -> LlamaShape:
        """From a `transformers` config. Errors: ValueError for another family, or for sliding-window attention."""
        family = getattr(config, "model_type", None)
        takes = f"a transformers config of the family {' or '.join(FAMILIES)}"
        _check.require(family in FAMILIES, "config", family or type(config).__name__, takes)
        takes = "full attention in every layer: a sliding window bounds the cache, which is not counted here"
        _check.require(not getattr(config, "use_sliding_window", False), "config", "use_sliding_window=True", takes)
        heads = config.num_attention_heads
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            num_hidden_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(getattr(config, "mlp_bias", False)),
            qk_norm=family == "qwen3",
        )

    @property
    def q_size(self) -> int:
        """Width of the queries of one token: num_attention_heads * head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys of one token, and of its values: num_key_value_heads * head_dim."""
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_linears(self) -> dict[str, tuple[int, int, bool]]:
        """(in_features, out_features, bias) of each matrix of one layer, by its name in the model."""
        hidden, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (hidden, self.q_size, self.qkv_bias),
            "k_proj": (hidden, self.kv_size, self.qkv_bias),
            "v_proj": (hidden, self.kv_size, self.qkv_bias),
            "o_proj": (self.q_size, hidden, self.o_bias),
            "gate_proj": (hidden, inner, self.mlp_bias),
            "up_proj": (hidden, inner, self.mlp_bias),
            "down_proj": (inner, hidden, self.mlp_bias),
        }


def _matrix_elements(shape: LlamaShape) -> int:
    """Elements of the matrices inside the layers: what a quantizer converts."""
    return shape.num_hidden_layers * sum(n * m for n, m, _ in shape.layer_linears.values())


def parameter_count(config: PretrainedConfig) -> int:
    """Parameters of the model with its head; a tied embedding counts once."""
    shape = LlamaShape.of(config)
    biases = sum(m for _, m, bias in shape.layer_linears.values() if bias)
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if shape.qk_norm else 0)
    embeddings = (1 if shape.tied else 2) * shape.vocab_size * shape.hidden_size
    return _matrix_elements(shape) + shape.num_hidden_layers * (biases + norms) + embeddings + shape.hidden_size


def weight_bytes(
    config: PretrainedConfig, dtype: torch.dtype | str, *, weight_dtype: torch.dtype | str | None = None
) -> int:
    """Bytes of all parameters in `dtype`, with the layers' matrices in `weight_dtype` if given.

    Embedding, head, norms and biases stay in `dtype`, as quantizers leave them; group scales are not counted.
    """
    bits = bits_per_element("dtype", dtype)
    matrix_bits = bits if weight_dtype is None else bits_per_element("weight_dtype", weight_dtype)
    matrices = _matrix_elements(LlamaShape.of(config))
    return ((parameter_count(config) - matrices) * bits + matrices * matrix_bits) // 8


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype | str) -> int:
    """Bytes of keys and values that one token of one sequence keeps over all layers."""
    shape = LlamaShape.of(config)
    return 2 * shape.num_hidden_layers * shape.kv_size * bits_per_element("dtype", dtype) // 8


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on the device, by what they hold."""

    weights: int
    kv_cache: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.logits


def _live_elements(shape: LlamaShape, batch: int, q_len: int) -> int:
    """Most elements of activations alive at once over the stages of a layer, as `transformers` runs it.

    In the MLP: the embedding's output and the layer's input, which the model's loop still holds, the residual, the
    normed input, and three of the inner width (the activated gate, up, their product). In the rotary embedding: the
    embedding's output, the layer's input, its normed form, q, k and v, and three more of q's size (q * cos, the rotated
    half, its product with sin). Beside either, cos and sin. Attention is fused: its scores are never in memory.
    """
    mlp = 4 * shape.hidden_size + 3 * shape.intermediate_size
    rotary = 3 * shape.hidden_size + 4 * shape.q_size + 2 * shape.kv_size
    return batch * q_len * max(mlp, rotary) + q_len * 2 * shape.head_dim


def memory_bytes(
    config: PretrainedConfig,
    dtype: torch.dtype | str,
    batch: int,
    seq_len: int,
    *,
    q_len: int | None = None,
    weight_dtype: torch.dtype | str | None = None,
    kv_dtype: torch.dtype | str | None = None,
    logits_to_keep: int = 1,
) -> MemoryBreakdown:
    """Memory to hold `batch` sequences of `seq_len` tokens and run a step of `q_len` new tokens on each.

    q_len: None for a prefill of all `seq_len` tokens, the step that needs most; 1 for decode.
    Activations are the peak of one layer with fused attention, since layers reuse each other's memory; they and the
    logits do not quite meet in time, so that the total errs upwards.
    Errors: ValueError for sizes below one, or q_len above seq_len.
    """
    shape = LlamaShape.of(config)
    batch = _check.integer("batch", batch, 1)
    seq_len = _check.integer("seq_len", seq_len, 1)
    q_len = seq_len if q_len is None else _check.integer("q_len", q_len, 1, seq_len)
    rows = min(q_len, _check.integer("logits_to_keep", logits_to_keep, 1))
    bits = bits_per_element("dtype", dtype)
    return MemoryBreakdown(
        weights=weight_bytes(config, dtype, weight_dtype=weight_dtype),
        kv_cache=batch * seq_len * kv_bytes_per_token(config, dtype if kv_dtype is None else kv_dtype),
        activations=_live_elements(shape, batch, q_len) * bits // 8,
        logits=batch * rows * shape.vocab_size * bits // 8,
    )
