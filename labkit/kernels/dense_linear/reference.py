"""The definition of a linear layer."""

import torch


def dense_linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y_o = sum over i of x_i * weight_oi, plus bias_o, summed in float32 or better and returned in x's dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.einsum("...i,oi->...o", x.to(wide), weight.to(wide))
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)
