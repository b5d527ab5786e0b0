"""Attention modules: MHA, GQA and MQA as one, latent attention (MLA), merging the KV heads of a
whole model, and FlashAttention in a model of `transformers`."""

from labkit.attention.healing import HealReport, heal
from labkit.attention.latent import LatentAttention
from labkit.attention.merging import MergeReport, merge_kv_heads_
from labkit.attention.multi_head import MultiHeadAttention
from labkit.attention.recorded import Healing, HealingPoint, MergeResult, MergeStudy, recorded_merge_study
from labkit.attention.registration import register
from labkit.attention.rotary import Rotary
from labkit.attention.study import merge_study

__all__ = [
    "HealReport",
    "Healing",
    "HealingPoint",
    "LatentAttention",
    "MergeReport",
    "MergeResult",
    "MergeStudy",
    "MultiHeadAttention",
    "Rotary",
    "heal",
    "merge_kv_heads_",
    "merge_study",
    "recorded_merge_study",
    "register",
]
