"""Modules that hold packed weights in place of `nn.Linear` and `nn.Embedding`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from labkit import _check
from labkit.kernels import quantized_linear
from labkit.kernels.quantized_linear import Int4PackWeight, Weight, decode_layout, portable
from labkit.kernels.types import PackedWeight
from labkit.quantization.calibration import Replacement


class _Packed(nn.Module):
    """Holds the tensors of one packed weight as buffers. They follow the module to a device, never to a dtype.

    A state dict holds the portable form whatever lies in memory, so that a checkpoint can go to any dtype, device and
    processor; loading takes that form, with assign=True or without, and lays it out for where it is.
    """

    is_quantized = True

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        _check.require(isinstance(weight, PackedWeight), "weight", type(weight).__name__, "a PackedWeight")
        # Empty: it goes where the module is sent and takes on the dtype that its activations will have.
        self.register_buffer("_activations", torch.empty(0, dtype=dtype, device=weight.device), persistent=False)
        self.weight: Weight = weight
        self._hold(weight)

    def _hold(self, weight: Weight) -> None:
        """Make `weight` the module's, and its tensors the module's buffers."""
        for name in (*self.weight.tensors, *weight.tensors):
            self._buffers.pop(name, None)
        for name, tensor in weight.tensors.items():
            self.register_buffer(name, tensor)
        self.weight = weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> _Packed:
        held, before = self.weight, self._activations
        for name in held.tensors:
            self._buffers.pop(name)
        try:
            super()._apply(fn, recurse)
            device, dtype = self._activations.device, self._activations.dtype
            if (device, dtype) != (held.device, before.dtype):
                held = self._laid_out(self.portable().map(lambda tensor: tensor.to(device)))
        except BaseException:
            # Such as too little memory there: the next move must find that this one did not happen.
            self._activations = before
            raise
        finally:
            self._hold(held)
        return self

    def _save_to_state_dict(self, destination: dict[str, torch.Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.weight.tensors:
            del destination[prefix + name]
        destination.update({prefix + name: tensor for name, tensor in self.portable().tensors.items()})

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        held = self.weight
        self._hold(self.portable())
        try:
            super()._load_from_state_dict(*args, **kwargs)
            # With assign=True the buffers are other tensors now, and perhaps on another device.
            loaded = replace(self.weight, **{name: self._buffers[name] for name in self.weight.tensors})
            held = self._laid_out(loaded)
            self._activations = self._activations.new_empty(0, device=loaded.device)
        finally:
            self._hold(held)

    def _laid_out(self, weight: PackedWeight) -> Weight:
        return weight

    def portable(self) -> PackedWeight:
        """The weight in the order that does not depend on a processor."""
        return portable(self.weight)

    def extra_repr(self) -> str:
        weight = self.weight
        order = (
            ", act-order"
            if getattr(weight, "g_idx", None) is not None or getattr(weight, "order", None) is not None
            else ""
        )
        return f"{weight.in_features}, {weight.out_features}, bits={weight.bits}, group_size={weight.group_size}{order}"


class QuantLinear(_Packed):
    """`y = x W^T + b` with W packed; x `(..., in_features)`, y `(..., out_features)` in x's dtype.

    The weight lies as it is fastest to decode with, given the module's device and the dtype of its activations
    (`dtype`, and from then on what `.to(dtype)` says): packed matmuls on the CPU run in bfloat16. On a GPU one module
    is for one stream at a time.
    """

    def __init__(
        self, weight: PackedWeight, bias: torch.Tensor | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(weight, dtype)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._hold(self._laid_out(weight))

    def _laid_out(self, weight: PackedWeight) -> Weight:
        return decode_layout(weight, self._activations.dtype)

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    def projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`forward` with what can be looked up looked up, for a loop of many small steps; moving the module ends it."""
        fast = isinstance(self.weight, Int4PackWeight) and self._activations.dtype is torch.bfloat16
        return self.weight.bound() if fast and self.bias is None else self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = quantized_linear(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def packed_replacement(linear: nn.Linear, weight: PackedWeight) -> Replacement:
    """A QuantLinear in the place of `linear`."""
    return Replacement(QuantLinear(weight, linear.bias, dtype=linear.weight.dtype), weight.dequantize())


class QuantEmbedding(_Packed):
    """A table of packed rows; a lookup unpacks the rows that it needs. ids `(...)` to `(..., in_features)`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        flat, weight = ids.reshape(-1), self.weight
        zeros = None if weight.zeros is None else weight.zeros[flat]
        rows = replace(weight, qweight=weight.qweight[flat], scales=weight.scales[flat], zeros=zeros)
        return rows.dequantize(self._activations.dtype).view(*ids.shape, weight.in_features)
