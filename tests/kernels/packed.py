"""What the tests of packed weights share: a matrix rounded to a grid, and bit-by-bit equality."""

import torch

from labkit.kernels import PackedWeight
from labkit.kernels.bits import pack_bits


def packed(weight: torch.Tensor, bits: int, group: int, *, sym: bool = False, act_order: bool = False) -> PackedWeight:
    """`weight` rounded to a grid from its group's least to largest value, columns assigned to groups at random."""
    out_features, in_features = weight.shape
    g_idx = torch.randperm(in_features) // group if act_order else torch.arange(in_features) // group
    members = torch.stack([weight[:, g_idx == g] for g in range(in_features // group)], dim=1)
    high = members.abs().amax(-1) if sym else members.amax(-1).clamp_min(0)
    low = -high if sym else members.amin(-1).clamp_max(0)
    top = (1 << bits) - 1
    scales = ((high - low) / top).to(torch.bfloat16)
    zeros = torch.full_like(low, 1 << (bits - 1)) if sym else (-low / scales.float()).round().clamp(0, top)
    codes = (weight / scales.float()[:, g_idx]).round().add(zeros[:, g_idx]).clamp(0, top)
    order = g_idx.int() if act_order else None
    stored = None if sym else zeros.to(torch.uint8)
    return PackedWeight(pack_bits(codes.to(torch.uint8), bits), scales, stored, order, bits, group, in_features)


def same(a: PackedWeight, b: PackedWeight) -> bool:
    """Every tensor bit by bit."""
    equal = a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(a.tensors[name], b.tensors[name]) and a.tensors[name].dtype == b.tensors[name].dtype
        for name in a.tensors
    )
    return equal and (a.bits, a.group_size, a.in_features) == (b.bits, b.group_size, b.in_features)
