"""FLOPs and bytes of one step of a Llama-family model, op by op, from its config.

A multiply-add is two FLOPs. Matmul FLOPs are exact, and are what `torch.utils.flop_counter` counts. The elementwise
rest (norms, softmax, rotary embedding, activation, residuals, biases) is a count of operations an element, with an
exponential or a square root as one; it is in `OpCost.flops` and not in `OpCost.matmul_flops`. Attention is counted
dense: the causal half that a kernel may skip is not taken off.

Bytes are the least that an op run alone must move: each input read once, each output written once, attention scores
never leaving the chip. Q, K and V each read the hidden state, since they are three ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.sizing import LlamaShape, bits_per_element

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LINEAR_OPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

# Elementwise operations an element, in the order of the definitions.
_NORM_FLOPS = 4  # square, add into the mean, times the reciprocal root, times the gain
_ROPE_FLOPS = 3  # x * cos + rotated * sin
_SOFTMAX_FLOPS = 6  # scale, maximum, subtract, exponential, sum, divide
_GATED_SILU_FLOPS = 5  # negate, exponential, add one, divide, times up
_TOKEN_ID_BYTES = 8


@dataclass(frozen=True)
class OpCost:
    """One op of a step: totals over the `count` times that the step runs it.

    flops: FLOPs, of which matmul_flops in matmuls. Bytes moved, by what they are: weight_bytes read, kv_bytes of the
    cache read or written, activation_bytes of everything else, in and out.
    """

    name: str
    count: int
    flops: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    matmul_flops: int

    @property
    def bytes(self) -> int:
        """All bytes moved."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class _Step:
    """The sizes of one step, in elements and bits, and the cost of each kind of op in it."""

    shape: LlamaShape
    batch: int
    q_len: int
    kv_len: int
    bits: int  # activations, embedding, head, norms, biases
    matrix_bits: int  # the layers' matrices
    kv_bits: int

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    def op(
        self,
        name: str,
        *,
        matmul: int = 0,
        other: int = 0,
        weight_bits: int = 0,
        kv: int = 0,
        elements: int = 0,
        ids: int = 0,
    ) -> OpCost:
        """From what one run of it takes: FLOPs, bits of weights, elements of cache and of activations, token ids."""
        once = name in ("embed", "final_norm", "lm_head")
        count = 1 if once else self.shape.num_hidden_layers
        activations = elements * self.bits // 8 + ids * _TOKEN_ID_BYTES
        kv_bytes = kv * self.kv_bits // 8
        return OpCost(
            name,
            count=count,
            flops=count * (matmul + other),
            weight_bytes=count * (weight_bits // 8),
            kv_bytes=count * kv_bytes,
            activation_bytes=count * activations,
            matmul_flops=count * matmul,
        )

    def linear(self, name: str) -> OpCost:
        n, m, bias = self.shape.layer_linears[name]
        bias_bits = m * self.bits if bias else 0
        return self.op(
            name,
            matmul=2 * self.tokens * n * m,
            other=self.tokens * m if bias else 0,
            weight_bits=n * m * self.matrix_bits + bias_bits,
            elements=self.tokens * (n + m),
        )

    def norm(self, name: str) -> OpCost:
        width = self.shape.hidden_size
        elements = self.tokens * width
        return self.op(name, other=_NORM_FLOPS * elements, weight_bits=width * self.bits, elements=2 * elements)

    def residual(self, name: str) -> OpCost:
        elements = self.tokens * self.shape.hidden_size
        return self.op(name, other=elements, elements=3 * elements)

    def embed(self) -> OpCost:
        """A row of the table a token, not the table."""
        elements = self.tokens * self.shape.hidden_size
        return self.op("embed", weight_bits=elements * self.bits, elements=elements, ids=self.tokens)

    def rope(self) -> OpCost:
        """Rotates q and k in place of one read and one write of each; Qwen3's norms of q and k are counted here too."""
        shape = self.shape
        elements = self.tokens * (shape.q_size + shape.kv_size)
        norm = _NORM_FLOPS * elements if shape.qk_norm else 0
        return self.op(
            "rope",
            other=_ROPE_FLOPS * elements + norm,
            weight_bits=2 * shape.head_dim * self.bits if shape.qk_norm else 0,
            elements=2 * elements + 2 * self.q_len * shape.head_dim,  # cos and sin, shared over the batch
        )

    def kv_write(self) -> OpCost:
        new = self.tokens * 2 * self.shape.kv_size
        return self.op("kv_write", kv=new, elements=new)

    def attention(self) -> OpCost:
        """Q against every key, softmax, then the values; each key and value is read once, whatever the GQA group."""
        shape = self.shape
        scores = self.tokens * shape.num_attention_heads * self.kv_len
        return self.op(
            "attention",
            matmul=4 * scores * shape.head_dim,
            other=_SOFTMAX_FLOPS * scores,
            kv=self.batch * self.kv_len * 2 * shape.kv_size,
            elements=2 * self.tokens * shape.q_size,
        )

    def act_mul(self) -> OpCost:
        elements = self.tokens * self.shape.intermediate_size
        return self.op("act_mul", other=_GATED_SILU_FLOPS * elements, elements=3 * elements)

    def lm_head(self, rows: int) -> OpCost:
        n, m = self.shape.hidden_size, self.shape.vocab_size
        return self.op("lm_head", matmul=2 * rows * n * m, weight_bits=n * m * self.bits, elements=rows * (n + m))


def op_costs(
    config: PretrainedConfig,
    *,
    batch: int,
    q_len: int,
    kv_len: int,
    dtype: torch.dtype | str,
    weight_dtype: torch.dtype | str | None = None,
    kv_dtype: torch.dtype | str | None = None,
    logits_to_keep: int | None = None,
) -> list[OpCost]:
    """Cost of each op of one step, in the order in which the step runs them.

    q_len: new tokens of each sequence; kv_len: tokens attended to, the new ones included (equal in a first prefill).
    weight_dtype: of the layers' matrices, kv_dtype: of the cache, where they differ from `dtype`.
    logits_to_keep: rows a sequence that go through the head; None for all.
    Errors: ValueError for sizes below one, or kv_len below q_len.
    """
    q_len = _check.integer("q_len", q_len, 1)
    rows = q_len if logits_to_keep is None else min(q_len, _check.integer("logits_to_keep", logits_to_keep, 1))
    bits = bits_per_element("dtype", dtype)
    step = _Step(
        shape=LlamaShape.of(config),
        batch=_check.integer("batch", batch, 1),
        q_len=q_len,
        kv_len=_check.integer("kv_len", kv_len, q_len),
        bits=bits,
        matrix_bits=bits if weight_dtype is None else bits_per_element("weight_dtype", weight_dtype),
        kv_bits=bits if kv_dtype is None else bits_per_element("kv_dtype", kv_dtype),
    )
    return [
        step.embed(),
        step.norm("input_norm"),
        *map(step.linear, ("q_proj", "k_proj", "v_proj")),
        step.rope(),
        step.kv_write(),
        step.attention(),
        step.linear("o_proj"),
        step.residual("attn_residual"),
        step.norm("post_norm"),
        *map(step.linear, ("gate_proj", "up_proj")),
        step.act_mul(),
        step.linear("down_proj"),
        step.residual("mlp_residual"),
        step.norm("final_norm"),
        step.lm_head(step.batch * rows),
    ]
