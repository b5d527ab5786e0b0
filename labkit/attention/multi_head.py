"""Attention in which any number of query heads share a KV head: MHA, GQA and MQA are one module and one number."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig

from labkit import _check
from labkit.attention._context import check_cache, check_hidden, context_of, shared_attention
from labkit.attention.rotary import Rotary


class MultiHeadAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v for each head (Vaswani et al. 2017, equation 1), causal, with rotary positions.

    `num_key_value_heads` equal to `num_attention_heads` is MHA, 1 is MQA (Shazeer 2019), what lies between GQA (Ainslie
    et al. 2023); consecutive query heads share a KV head. Only `k_proj`, `v_proj` and the cache depend on it.

    head_dim: hidden_size / num_attention_heads by default. rope_theta: base of the rotary frequencies; rotary: a
    `Rotary` of its own in its place. bias: of the q, k and v projections; out_bias: of the last one, as `bias` by
    default. layer_idx: which layer of a cache is this one's.
    Errors: ValueError for numbers that do not divide and for an odd head_dim.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int | None = None,
        *,
        rope_theta: float = 10000.0,
        rotary: Rotary | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        layer_idx: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = _check.integer("hidden_size", hidden_size, 1)
        self.num_attention_heads = heads = _check.integer("num_attention_heads", num_attention_heads, 1)
        self.num_key_value_heads = _check.integer("num_key_value_heads", num_key_value_heads, 1)
        takes = f"a divisor of num_attention_heads={heads}"
        _check.require(heads % num_key_value_heads == 0, "num_key_value_heads", num_key_value_heads, takes)
        if head_dim is None:
            takes = f"a multiple of num_attention_heads={heads}, or head_dim with it"
            _check.require(hidden_size % heads == 0, "hidden_size", hidden_size, takes)
            head_dim = hidden_size // heads
        self.head_dim = _check.integer("head_dim", head_dim, 1)
        self.layer_idx = _check.integer("layer_idx", layer_idx, 0)
        self.rotary = Rotary(head_dim, rope_theta) if rotary is None else rotary
        takes = f"a Rotary for head_dim={head_dim}"
        fits = isinstance(self.rotary, Rotary) and self.rotary.head_dim == head_dim
        _check.require(fits, "rotary", rotary, takes)
        kw = {"dtype": dtype, "device": device}
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias, **kw)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias, **kw)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias, **kw)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias if out_bias is None else out_bias, **kw)
        self.rotary.to(self.q_proj.weight.device)

    @classmethod
    def from_llama(cls, attention: nn.Module, rotary: nn.Module | PretrainedConfig) -> MultiHeadAttention:
        """A copy of a Llama-family layer's `self_attn`, with the rotary positions of the model that it comes from.

        rotary: `model.model.rotary_emb`, or the model's config. Errors: ValueError for a layer that norms its queries
        and keys (Qwen3), one with a sliding window, one whose matrices are not plain, and for positions that depend on
        the text's length.
        """
        _check_llama(attention)
        weights = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
        q = weights["q"].weight
        head_dim = attention.head_dim
        if isinstance(rotary, PretrainedConfig):
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

            rotary = LlamaRotaryEmbedding(rotary)
        made = cls(
            q.shape[1],
            q.shape[0] // head_dim,
            weights["k"].weight.shape[0] // head_dim,
            head_dim,
            rotary=Rotary.from_transformers(rotary),
            bias=weights["q"].bias is not None,
            out_bias=weights["o"].bias is not None,
            layer_idx=attention.layer_idx,
            dtype=q.dtype,
            device=q.device,
        )
        for name, linear in weights.items():
            getattr(made, f"{name}_proj").load_state_dict(copy.deepcopy(linear.state_dict()))
        return made.train(attention.training).requires_grad_(q.requires_grad)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
    ) -> Tensor:
        """`hidden_states (batch, q_len, hidden_size)`, and as much comes back.

        attention_mask: bool or int `(batch, past + q_len)`, 0 where a slot is padding: it is never seen and takes no
        position, and a query that may see nothing attends to zeros. past_key_values: the tokens before these, to which
        their keys and values are added, in layer `layer_idx` (the module's own by default); q_len is free.
        """
        attended = self.attend(
            hidden_states, attention_mask=attention_mask, past_key_values=past_key_values, layer_idx=layer_idx
        )
        return self.o_proj(attended)

    def attend(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
    ) -> Tensor:
        """`forward` without its last projection: what each head saw, `(batch, q_len, num_attention_heads *
        head_dim)`."""
        layer_idx = self.layer_idx if layer_idx is None else layer_idx
        x = check_hidden(hidden_states, self.hidden_size, self.q_proj.weight)
        cache = check_cache(past_key_values, layer_idx)
        context = context_of(x, attention_mask, cache, layer_idx)
        query, key, value = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        angles = self.rotary.angles(context.positions, x.dtype)
        query, key = self.rotary(query, angles), self.rotary(key, angles)
        if cache is not None:
            key, value = cache.update(key, value, layer_idx)
        out = shared_attention(query, key, value, context, self.head_dim**-0.5)
        return out.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        """`(batch, q_len, heads * head_dim)` to `(batch, heads, q_len, head_dim)`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"num_attention_heads={self.num_attention_heads}, num_key_value_heads={self.num_key_value_heads}"


def _check_llama(attention: object) -> None:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    takes = "the self_attn of a Llama-family layer"
    known = isinstance(attention, nn.Module) and all(hasattr(attention, name) for name in (*names, "head_dim"))
    _check.require(known, "attention", type(attention).__name__, takes)
    plain = all(type(getattr(attention, name)) is nn.Linear for name in names)
    _check.require(plain, "attention", "matrices that are not plain nn.Linear", f"{takes}, not quantized")
    _check.require(not hasattr(attention, "q_norm"), "attention", "a layer with q_norm", f"{takes} without norms")
    config = getattr(attention, "config", None)
    whole = config if getattr(config, "model_type", None) == "mistral" else attention
    sliding = getattr(whole, "sliding_window", None)
    _check.require(sliding is None, "attention", f"sliding_window {sliding}", "full attention")
    scaling, usual = getattr(attention, "scaling", None), attention.head_dim**-0.5
    _check.require(scaling in (None, usual), "attention", f"scaling {scaling}", f"{takes}, which scales by {usual:.3g}")
