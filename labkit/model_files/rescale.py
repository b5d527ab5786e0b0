"""A seeded rescale of a Llama's channels that leaves what it computes as it was.

Weights that were quantized once lie on a grid, and quantizing them again on the same grid would lose nothing: a method
would look as good as the grid it happens to find. Scaling every input channel by its own factor takes the weights of a
group off their common grid, and the inverse factor, folded into what feeds the channel, keeps the function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Factors lie between e^-0.2 and e^0.2: enough to spread a grid, too little to make outliers.
SPREAD = 0.2


def _pairs(config: PretrainedConfig, layer: int) -> Iterator[tuple[int, list[str], list[str]]]:
    """Places in one layer where a channel may be scaled: (channels, written by, read by).

    Each is a weight name. What writes a channel is scaled along its rows (a norm's gain: its elements), what reads it
    is divided along its columns. Nothing but an element-wise gain or product, or attention's weighted sum over tokens,
    stands between the two. Rows of q and k are left alone: rotary embedding mixes them.
    """
    at = f"model.layers.{layer}."
    attention, mlp = at + "self_attn.{}.weight", at + "mlp.{}.weight"
    qkv = [attention.format(name) for name in ("q_proj", "k_proj", "v_proj")]
    gate_up = [mlp.format(name) for name in ("gate_proj", "up_proj")]
    kv_channels = config.num_key_value_heads * config.head_dim
    yield config.hidden_size, [at + "input_layernorm.weight"], qkv
    yield config.hidden_size, [at + "post_attention_layernorm.weight"], gate_up
    yield kv_channels, [attention.format("v_proj")], [attention.format("o_proj")]
    yield config.intermediate_size, [mlp.format("up_proj")], [mlp.format("down_proj")]


def _for_columns(factors: Tensor, columns: int, head_dim: int) -> Tensor:
    """Factors of v's channels as o_proj reads them: each KV head's, once for every query head of its group."""
    groups = columns // factors.numel()
    return factors.view(-1, head_dim).repeat_interleave(groups, dim=0).flatten() if groups > 1 else factors


@torch.no_grad()
def rescale_(state: dict[str, Tensor], config: PretrainedConfig, seed: int, *, inverse: bool = False) -> None:
    """Rescale the weights of a `transformers` Llama in place; `inverse` undoes it.

    state: weights by name, as from `state_dict()`. The embedding, the head and the final norm stay as they are.
    Each weight is computed in float64 and rounded once to its own dtype, so that the function is kept up to one
    rounding of each weight.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in range(config.num_hidden_layers):
        for channels, writers, readers in _pairs(config, layer):
            exponents = (2 * torch.rand(channels, generator=generator, dtype=torch.float64) - 1) * SPREAD
            factors = torch.exp(-exponents if inverse else exponents)
            for name in writers:
                weight = state[name]
                rows = factors.view(-1, *[1] * (weight.ndim - 1))
                weight.copy_(weight.double() * rows)
            for name in readers:
                weight = state[name]
                weight.copy_(weight.double() / _for_columns(factors, weight.shape[1], config.head_dim))
