"""The drafter's network: one decoder layer that reads the target's hidden states, and predicts the next ones.

After EAGLE (Li et al. 2024, arXiv 2401.15077, section 4.1): place i gets the target's hidden state there and the token
that came after it, and answers with what the target's hidden state at i + 1 will be; through the target's own head that
is a guess at token i + 2. A draft goes on from its own answers; training on them as well is "training-time test" of
EAGLE-3 (Li et al. 2025, arXiv 2503.01840, section 3.1). The vocabulary that it drafts from is reduced, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from labkit import _check


@dataclass(frozen=True)
class EagleConfig:
    """The shape of a head: that of its target's layers, and how many tokens it drafts from."""

    target: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            _check.integer(name, getattr(self, name), 1)
        _check.integer("vocab_size", self.vocab_size, 1)
        _check.integer("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        _check.integer("max_position_embeddings", self.max_position_embeddings, 1)
        shared = self.num_attention_heads % self.num_key_value_heads == 0
        takes = f"a divisor of num_attention_heads, {self.num_attention_heads}"
        _check.require(shared, "num_key_value_heads", self.num_key_value_heads, takes)

    def layer_config(self) -> LlamaConfig:
        """A Llama of one layer of this shape: what its cache and its rotary positions are made from."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.draft_vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            max_position_embeddings=self.max_position_embeddings,
        )


class EagleModel(nn.Module):
    """The weights of a head. `draft_ids (draft_vocab_size,)`: the target's id of each token that it drafts from.

    It holds neither embedding nor output matrix: both are the target's, the second one's rows of `draft_ids`.
    """

    def __init__(self, config: EagleConfig, draft_ids: Tensor) -> None:
        super().__init__()
        _check.tensor("draft_ids", draft_ids, ndim=1, dtypes=(torch.int64, torch.int32))
        takes = f"{config.draft_vocab_size} different ids of the target"
        _check.require(len(draft_ids.unique()) == config.draft_vocab_size, "draft_ids", f"{len(draft_ids)} ids", takes)
        self.config = config
        size, eps, head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.register_buffer("draft_ids", draft_ids.to(torch.int32))
        self.embed_norm, self.feature_norm = (nn.RMSNorm(size, eps) for _ in range(2))
        self.input_norm, self.post_norm, self.norm = (nn.RMSNorm(size, eps) for _ in range(3))
        self.fuse = nn.Linear(2 * size, size, bias=False)
        self.q_proj = nn.Linear(size, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, size, bias=False)
        self.gate_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)

    def rotary_table(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of `length` positions, `(length, head_dim)` each, the first half of sin negated
        (`labkit.engine.placement.rotary_table`)."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.config.rope_theta**-half)
        return torch.cat((angles, angles), -1).cos(), torch.cat((-angles, angles), -1).sin()

    def fused(self, embedded: Tensor, features: Tensor) -> Tensor:
        """The layer's input `(..., hidden_size)` from a token's embedding and the hidden state before it."""
        return self.fuse(torch.cat((self.embed_norm(embedded), self.feature_norm(features)), dim=-1))

    def unrolled(self, embedded: Sequence[Tensor], features: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Tensor]:
        """Features predicted at each place by a draft of `len(embedded)` steps that starts there, for training.

        embedded[s] `(batch, seq_len, hidden_size)`: of the token that step s reads, s + 1 places after its start;
        features: the target's, `(batch, seq_len, hidden_size)`; rotary: cos and sin, `(seq_len + steps, head_dim)`.
        Step s of the draft that starts at i sees the true places up to i, and its own steps before: as in use.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        out: list[Tensor] = []
        for step, tokens in enumerate(embedded):
            x = self.fused(tokens, features if step == 0 else out[-1])
            x = x + self._attention(self.input_norm(x), step, seen, rotary)
            hidden = self.post_norm(x)
            x = x + self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
            out.append(self.norm(x))
        return out

    def _attention(
        self, x: Tensor, step: int, seen: list[tuple[Tensor, Tensor]], rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention of one step; its keys and values are added to `seen`."""
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.config.head_dim)
        cos, sin = (table[step : step + length] for table in rotary)
        query, key = (_turned(proj(x).view(heads).transpose(1, 2), cos, sin) for proj in (self.q_proj, self.k_proj))
        value = self.v_proj(x).view(heads).transpose(1, 2)
        groups = query.shape[1] // key.shape[1]
        seen.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        keys, values = seen[0]
        scale = self.config.head_dim**-0.5
        scores = (query @ keys.transpose(2, 3)) * scale
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.float().masked_fill(future, -torch.inf)
        # Of its own earlier steps a draft sees one place each: the one that began where it did.
        own = [(query * later).sum(-1, keepdim=True).float() * scale for later, _ in seen[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(values.dtype)
        mixed = weights[..., :length] @ values
        for index, (_, later) in enumerate(seen[1:]):
            mixed = mixed + weights[..., length + index, None] * later
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, with the signs of `labkit.engine.placement.rotary_table`."""
    return states * cos + states.roll(states.shape[-1] // 2, -1) * sin
