"""What evicting by attention has to come to: one layer over its whole past, with a mask a head for what is gone."""

from collections.abc import Callable

import torch
from transformers import DynamicCache, LlamaForCausalLM

from labkit.models import tiny_model

# (attention so far (kv_heads, seen), alive (kv_heads, seen) bool, tokens to keep, latest tokens that stay) -> alive
Choose = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def one_layer() -> LlamaForCausalLM:
    """A model whose keys and values are each token's own, and that says how much attention each gets."""
    return tiny_model(num_hidden_layers=1, attn_implementation="eager", initializer_range=0.5)


@torch.no_grad()
def masked_step(
    model: LlamaForCausalLM, step: torch.Tensor, cache: DynamicCache, alive: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(1, q_len, vocab)` and attention weights `(heads, q_len, seen)` of a step that sees `alive (kv_heads,
    seen before)` and, causally, itself."""
    q_len, seen = step.shape[1], alive.shape[1]
    config = model.config
    visible = torch.cat((alive[:, None].expand(-1, q_len, -1), torch.ones(2, q_len, q_len).tril().bool()), dim=2)
    visible = visible.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None]
    at = torch.arange(seen, seen + q_len)[None]
    out = model(step, attention_mask=mask, position_ids=at, past_key_values=cache, output_attentions=True)
    return out.logits, out.attentions[0][0]


def by_kv_head(weights: torch.Tensor) -> torch.Tensor:
    """Attention summed over queries and over the heads that share a KV head: `(2, seen)`."""
    return weights.reshape(2, -1, *weights.shape[1:]).sum((1, 2))


def heaviest_alive(mass: torch.Tensor, alive: torch.Tensor, total: int, recent: int) -> torch.Tensor:
    """H2O's choice, head by head and token by token."""
    result = torch.zeros_like(alive)
    for head in range(len(alive)):
        held = alive[head].nonzero()[:, 0].tolist()
        latest, older = held[len(held) - recent :], held[: len(held) - recent]
        best = sorted(older, key=lambda i: -float(mass[head, i]))[: total - recent]
        result[head, latest + best] = True
    return result
