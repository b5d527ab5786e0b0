"""The definition of a linear layer whose weight is packed."""

import torch

from labkit.kernels.types import PackedWeight


def quantized_linear_reference(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """y_n = sum over k of x_k * (q_nk - z_ng) * s_ng, in float32 or better, returned in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ weight.dequantize(wide).T).to(x.dtype)
