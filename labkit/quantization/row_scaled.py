"""What INT8 and FP8 matrices share: one byte a weight, one scale a row, and inputs rounded token by token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from labkit import _check


def row_scales(rows: Tensor, top: float) -> Tensor:
    """The scale `(n, 1)`, float32, that takes the largest magnitude of each of `rows (n, k)` to `top`; 1 for zeros."""
    scales = rows.float().abs().amax(1, keepdim=True) / top
    # Below this a quotient can overflow. Written so that a scale of NaN stays NaN: it is not less than anything.
    return torch.where(scales < torch.finfo(torch.float32).tiny, 1.0, scales)


class RowScaledLinear(nn.Module):
    """`y = x W^T + b`, W of one byte a weight with a scale for each row; x is rounded as it comes, one scale a token.

    `qweight (out_features, in_features)` and `scales (out_features,)`, float32, are buffers that follow the module to a
    device and never to a dtype. x `(..., in_features)`, y `(..., out_features)` in x's dtype.
    """

    is_quantized = True
    code_dtype: torch.dtype

    def __init__(self, qweight: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        _check.tensor("qweight", qweight, ndim=2, dtypes=(self.code_dtype,))
        _check.tensor("scales", scales, ndim=1, dtypes=(torch.float32,))
        takes = f"({qweight.shape[0]},), one scale a row"
        _check.require(len(scales) == len(qweight), "scales", f"shape {tuple(scales.shape)}", takes)
        # Empty: it goes where the module is sent.
        self.register_buffer("_place", torch.empty(0, device=qweight.device), persistent=False)
        self.register_buffer("qweight", qweight.contiguous())
        self.register_buffer("scales", scales.contiguous())
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowScaledLinear:
        kept, before = {name: self._buffers.pop(name) for name in ("qweight", "scales")}, self._place
        try:
            super()._apply(fn, recurse)
            kept = {name: tensor.to(self._place.device) for name, tensor in kept.items()}
        except BaseException:
            self._place = before
            raise
        finally:
            for name, tensor in kept.items():
                self.register_buffer(name, tensor)
        return self

    @property
    def in_features(self) -> int:
        return self.qweight.shape[1]

    @property
    def out_features(self) -> int:
        return self.qweight.shape[0]

    def dequantize(self) -> Tensor:
        """The weight that the codes stand for, float32 `(out_features, in_features)`."""
        return self.qweight.float() * self.scales[:, None]

    def multiply(self, rows: Tensor) -> Tensor:
        """`rows (n, in_features)` times the transposed weight, without the bias: float32 or bfloat16 `(n, out)`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        ok = x.shape[-1:] == (self.in_features,) and x.is_floating_point()
        _check.require(ok, "x", f"shape {tuple(x.shape)} in {x.dtype}", f"floating-point (..., {self.in_features})")
        rows = x.reshape(-1, self.in_features)
        y = self.multiply(rows) if len(rows) else rows.new_empty(0, self.out_features)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kind = str(self.code_dtype).removeprefix("torch.")
        return f"{self.in_features}, {self.out_features}, {kind} weights and inputs, bias={self.bias is not None}"
