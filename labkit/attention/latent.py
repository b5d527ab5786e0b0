"""Multi-head latent attention (MLA; DeepSeek-AI 2024, DeepSeek-V2, arXiv 2405.04434, section 2.1): the cache holds one
latent vector a token, from which every head's keys and values are made, and one rotary key that all heads share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache

from labkit import _check
from labkit.attention._context import Context, check_cache, check_hidden, context_of, zero_where_blind
from labkit.attention._latent_weights import copy_weights
from labkit.attention.rotary import Rotary

FORMS = ("auto", "plain", "absorbed")


class LatentAttention(nn.Module):
    """Causal attention whose cache takes kv_lora_rank + qk_rope_head_dim numbers a token and layer.

    A token's latent c (the paper's equation 9, normed) gives head i the key W_UK,i c beside the shared rotary key and
    the value W_UV,i c. Two forms compute the same:
    "plain" makes every head's keys and values, for many queries; "absorbed" multiplies W_UK into the queries and W_UV
    into the attention's result (the paper's section 2.1.2), so that all heads read the latents themselves.

    q_lora_rank: queries go through a latent of their own (equations 12 and 13); None for one matrix. attention_bias:
    of the two projections into latents and of the last one. scale: of the scores; by default
    (qk_nope_head_dim + qk_rope_head_dim)^-1/2. Errors: ValueError for sizes below 1 and an odd qk_rope_head_dim.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        rope_theta: float = 10000.0,
        rotary: Rotary | None = None,
        scale: float | None = None,
        attention_bias: bool = False,
        norm_eps: float = 1e-6,
        layer_idx: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = _check.integer("hidden_size", hidden_size, 1)
        self.num_attention_heads = heads = _check.integer("num_attention_heads", num_attention_heads, 1)
        self.kv_lora_rank = _check.integer("kv_lora_rank", kv_lora_rank, 1)
        self.qk_nope_head_dim = _check.integer("qk_nope_head_dim", qk_nope_head_dim, 1)
        self.qk_rope_head_dim = rope = _check.integer("qk_rope_head_dim", qk_rope_head_dim, 2)
        self.v_head_dim = _check.integer("v_head_dim", v_head_dim, 1)
        self.layer_idx = _check.integer("layer_idx", layer_idx, 0)
        _check.require(rope % 2 == 0, "qk_rope_head_dim", rope, "an even number: rotary positions turn pairs")
        self.rotary = Rotary(rope, rope_theta, layout="pairs") if rotary is None else rotary
        fits = isinstance(self.rotary, Rotary) and self.rotary.head_dim == rope
        _check.require(fits, "rotary", rotary, f"a Rotary for head_dim={rope}")
        width = qk_nope_head_dim + rope
        self.scale = width**-0.5 if scale is None else _check.number("scale", scale)
        kw = {"dtype": dtype, "device": device}
        self.q_lora_rank = q_lora_rank
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, heads * width, bias=False, **kw)
        else:
            _check.integer("q_lora_rank", q_lora_rank, 1)
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=attention_bias, **kw)
            self.q_a_norm = nn.RMSNorm(q_lora_rank, eps=norm_eps, **kw)
            self.q_b_proj = nn.Linear(q_lora_rank, heads * width, bias=False, **kw)
        self.kv_a_proj = nn.Linear(hidden_size, kv_lora_rank + rope, bias=attention_bias, **kw)
        self.kv_a_norm = nn.RMSNorm(kv_lora_rank, eps=norm_eps, **kw)
        self.kv_b_proj = nn.Linear(kv_lora_rank, heads * (qk_nope_head_dim + v_head_dim), bias=False, **kw)
        self.o_proj = nn.Linear(heads * v_head_dim, hidden_size, bias=attention_bias, **kw)
        self.rotary.to(self.o_proj.weight.device)

    @classmethod
    def from_deepseek(cls, attention: nn.Module, rotary_emb: nn.Module) -> LatentAttention:
        """A copy of a DeepSeek-V2 or V3 layer's `self_attn`; rotary_emb: `model.model.rotary_emb`."""
        return copy_weights(cls, attention, rotary_emb)

    def cached_numbers_per_token(self) -> int:
        """What a token leaves in the cache: its latent and its rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_idx: int | None = None,
        form: str = "auto",
    ) -> Tensor:
        """`hidden_states (batch, q_len, hidden_size)`, and as much comes back; mask and cache as `MultiHeadAttention`.

        The cache gets the latents `(batch, 1, q_len, kv_lora_rank)` for keys and the rotary keys `(batch, 1, q_len,
        qk_rope_head_dim)` for values. form: "auto" takes the one that multiplies less.
        """
        _check.choice("form", form, FORMS)
        layer_idx = self.layer_idx if layer_idx is None else layer_idx
        x = check_hidden(hidden_states, self.hidden_size, self.o_proj.weight)
        cache = check_cache(past_key_values, layer_idx)
        context = context_of(x, attention_mask, cache, layer_idx)
        angles = self.rotary.angles(context.positions, x.dtype)
        query, query_rope = self._queries(x).split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        latent, key_rope = self.kv_a_proj(x)[:, None].split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        latent = self.kv_a_norm(latent)
        query_rope, key_rope = self.rotary(query_rope, angles), self.rotary(key_rope, angles)
        if cache is not None:
            latent, key_rope = cache.update(latent, key_rope, layer_idx)
        absorbed = form == "absorbed" or (form == "auto" and self.absorbed_is_cheaper(context.q_len, context.kv_len))
        compute = self._absorbed if absorbed else self._plain
        out = compute(query, query_rope, latent, key_rope, context)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def absorbed_is_cheaper(self, q_len: int, kv_len: int) -> bool:
        """Compares multiplications a head: the plain form makes keys and values of all `kv_len` tokens again."""
        rank, nope, rope, wide = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        absorbed = q_len * rank * (nope + wide) + q_len * kv_len * (2 * rank + rope)
        return absorbed < kv_len * rank * (nope + wide) + q_len * kv_len * (nope + rope + wide)

    def _queries(self, x: Tensor) -> Tensor:
        """`(batch, heads, q_len, qk_nope_head_dim + qk_rope_head_dim)`."""
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        return q.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK `(heads, qk_nope_head_dim, kv_lora_rank)` and W_UV `(heads, v_head_dim, kv_lora_rank)`."""
        weight = self.kv_b_proj.weight.unflatten(0, (self.num_attention_heads, -1))
        return weight.split((self.qk_nope_head_dim, self.v_head_dim), dim=1)

    def _plain(self, query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, context: Context) -> Tensor:
        up = self.kv_b_proj(latent[:, 0]).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
        key, value = up.split((self.qk_nope_head_dim, self.v_head_dim), dim=-1)
        key = torch.cat((key, key_rope.expand(-1, self.num_attention_heads, -1, -1)), dim=-1)
        query = torch.cat((query, query_rope), dim=-1)
        causal = context.allowed is None and context.q_len > 1
        out = F.scaled_dot_product_attention(query, key, value, context.allowed, is_causal=causal, scale=self.scale)
        return zero_where_blind(out, context.allowed)

    def _absorbed(
        self, query: Tensor, query_rope: Tensor, latent: Tensor, key_rope: Tensor, context: Context
    ) -> Tensor:
        """All heads' queries are rows of one product with the latents, which are read where they lie in the cache."""
        to_key, to_value = self._up()
        batch, heads, q_len, _ = query.shape
        rows = (batch, heads * q_len, -1)
        scores = (query @ to_key).reshape(rows) @ latent[:, 0].mT
        scores = torch.baddbmm(scores, query_rope.reshape(rows), key_rope[:, 0].mT) * self.scale
        scores = scores.unflatten(1, (heads, q_len))
        allowed = context.allowed
        if allowed is None and q_len > 1:
            allowed = torch.ones(q_len, context.kv_len, dtype=torch.bool, device=query.device).tril()[None, None]
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
        if allowed is not None:  # a row of -inf alone has no softmax
            weights = weights.masked_fill(~allowed, 0.0)
        seen = (weights.reshape(batch, heads * q_len, -1) @ latent[:, 0]).unflatten(1, (heads, q_len))
        return seen @ to_value.mT

    def extra_repr(self) -> str:
        cached = self.cached_numbers_per_token()
        return f"num_attention_heads={self.num_attention_heads}, numbers cached a token={cached}"
