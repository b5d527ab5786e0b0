"""The definition of quantizing keys or values."""

import torch

from labkit.kernels.kv_types import QuantizedKV, pack_codes


def kv_quantize_reference(
    x: torch.Tensor, bits: int, group_size: int, axis: str, scales_dtype: torch.dtype
) -> QuantizedKV:
    """scale = (max - min) / (2^bits - 1) of each group, code = round((x - minimum) / scale) with the rounded two."""
    dim = 2 if axis == "channel" else 3
    grouped = x.float().unflatten(dim, (-1, group_size))
    low, high = grouped.amin(dim + 1), grouped.amax(dim + 1)
    top = (1 << bits) - 1
    scales, minimums = ((high - low) / top).to(scales_dtype), low.to(scales_dtype)
    steps = (grouped - minimums.float().unsqueeze(dim + 1)) / scales.float().unsqueeze(dim + 1)
    # 0 / 0 where a group is constant: code 0, so that its minimum comes back.
    codes = steps.nan_to_num(0.0).clamp(0, top).round().to(torch.uint8).flatten(dim, dim + 1)
    return QuantizedKV(pack_codes(codes, bits), scales, minimums, None, None, bits, group_size, axis)
