"""From a DeepSeek-V2 or V3 attention layer of transformers to `LatentAttention`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torch import nn

from labkit import _check
from labkit.attention.rotary import Rotary

if TYPE_CHECKING:
    from labkit.attention.latent import LatentAttention

# Their names there, and here.
_NAMES = {
    "q_proj": "q_proj",
    "q_a_proj": "q_a_proj",
    "q_a_layernorm": "q_a_norm",
    "q_b_proj": "q_b_proj",
    "kv_a_proj_with_mqa": "kv_a_proj",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "kv_b_proj",
    "o_proj": "o_proj",
}


def copy_weights(cls: type[LatentAttention], attention: nn.Module, rotary_emb: nn.Module) -> LatentAttention:
    """A module of the same sizes with copies of the weights.

    Version 2 turns neighbouring channels, (2i, 2i + 1); version 3 does where its config says `rope_interleave`, and
    the two halves of a head otherwise. Which one it is follows from the weights: reading them the other way is wrong.
    """
    known = isinstance(attention, nn.Module) and hasattr(attention, "kv_a_proj_with_mqa")
    takes = "the self_attn of a DeepSeek-V2 or V3 layer"
    _check.require(known and hasattr(attention, "config"), "attention", type(attention).__name__, takes)
    linears = [module for name, module in attention.named_children() if name in _NAMES and name.endswith("proj")]
    plain = all(type(module) is nn.Linear for module in linears)
    _check.require(plain, "attention", "matrices that are not plain nn.Linear", f"{takes}, not quantized")
    config, weight = attention.config, attention.o_proj.weight
    pairs = getattr(config, "rope_interleave", True)
    made = cls(
        config.hidden_size,
        config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        q_lora_rank=config.q_lora_rank,
        rotary=Rotary.from_transformers(rotary_emb, layout="pairs" if pairs else "halves"),
        scale=attention.scaling,
        attention_bias=config.attention_bias,
        norm_eps=attention.kv_a_layernorm.variance_epsilon,
        layer_idx=attention.layer_idx,
        dtype=weight.dtype,
        device=weight.device,
    )
    for theirs, ours in _NAMES.items():
        module = getattr(attention, theirs, None)
        if module is not None:
            getattr(made, ours).load_state_dict(copy.deepcopy(module.state_dict()))
    return made.train(attention.training).requires_grad_(weight.requires_grad)
