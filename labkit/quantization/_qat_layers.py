"""A linear layer that trains through its own rounding: the weight it multiplies with is the one that will be packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from labkit.kernels.types import PackedWeight
from labkit.quantization.packing import pack_weight
from labkit.quantization.primitives import Grid, stored_scales

# No step size falls below this part of what it began as: at 0 and below there is no grid.
_LEAST = 0.05


def put(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Have `modules` stand in the model, each by its full name."""
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


class _Round(torch.autograd.Function):
    """(clamp(round(u), 0, top) - z) * s, u in codes; the gradient goes through the rounding as if it were not there.

    latent u `(out_features, groups, group)`, steps and zeros `(out_features, groups)`; returns `(out_features,
    in_features)` in `dtype`. Bengio, Leonard and Courville 2013: the straight-through estimator. A u beyond the grid's
    end gets no gradient that would take it further out, and all of one that brings it back.
    With u in codes, the gradient of the step size is the code itself, sum over the group of g * (q - z); LSQ (Esser et
    al. 2020, equation 3), which holds u * s in place of u, subtracts u from that.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        latent: torch.Tensor,
        steps: torch.Tensor,
        zeros: torch.Tensor,
        top: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        scales = stored_scales(steps)
        ctx.save_for_backward(latent, scales, zeros)
        ctx.top = top
        codes = latent.round().clamp_(0, top)
        return codes.sub_(zeros[..., None]).mul_(scales[..., None]).flatten(1).to(dtype)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        latent, scales, zeros = ctx.saved_tensors
        gradient = gradient.float().view_as(latent)
        rounded = latent.round()
        codes = rounded.clamp(0, ctx.top)
        of_latent = None
        if ctx.needs_input_grad[0]:
            of_latent = gradient * scales[..., None]
            # Descent goes against the gradient: out at the low end where that is positive.
            of_latent.masked_fill_((rounded - codes) * of_latent < 0, 0.0)
        of_steps = codes.sub_(zeros[..., None]).mul_(gradient).sum(-1) if ctx.needs_input_grad[1] else None
        return of_latent, of_steps, None, None, None


class FakeQuantLinear(nn.Module):
    """In the place of `linear` while it is trained: `y = x W^T + b` with W what `packed()` will hold, at all times.

    Trained are `latent`, the codes before they are rounded `(out_features, groups, group)`, and `relative`, each step
    size over the one that it began with `(out_features, groups)`: in these units one learning rate serves all matrices.
    Columns lie in group order, so under act-order x is sorted first. `teaching`: the float layer answers instead.
    A latent begins where the float weight lies on the grid; in the middle of its code where that is another than the
    nearest, as GPTQ's often are: from the float weight's place it would fall back at once, all of them together.
    """

    def __init__(self, linear: nn.Linear, start: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        # In a list, so that its weight is none of this module's parameters.
        self._linear = [linear]
        self.start, self.dtype, self.teaching = start, dtype, False
        self.top = (1 << start.bits) - 1
        self.order = None if start.g_idx is None else torch.argsort(start.g_idx, stable=True)
        zeros = start.zeros
        middle = torch.full(start.scales.shape, 1 << (start.bits - 1), device=start.device)
        self.zeros = (middle if zeros is None else zeros).float()
        self.scales = start.scales.float()
        self.latent = nn.Parameter(self._begin())
        self.relative = nn.Parameter(torch.ones_like(self.scales))

    @torch.no_grad()
    def _begin(self) -> torch.Tensor:
        codes, weight = (
            matrix.float() if self.order is None else matrix.float()[:, self.order]
            for matrix in (self.start.codes(), self.linear.weight)
        )
        shape = (1, (-1, self.start.group_size))
        codes, weight = codes.unflatten(*shape), weight.unflatten(*shape)
        exact = weight / self.scales[..., None] + self.zeros[..., None]
        return torch.where(exact.round() == codes, exact, codes)

    @property
    def linear(self) -> nn.Linear:
        """The float layer that it stands for."""
        return self._linear[0]

    @property
    def steps(self) -> torch.Tensor:
        """Step sizes before they are rounded to the dtype they are stored in, `(out_features, groups)`."""
        return self.relative.clamp_min(_LEAST) * self.scales

    def weight(self) -> torch.Tensor:
        """What it multiplies with, `(out_features, in_features)`, columns in group order."""
        return _Round.apply(self.latent, self.steps, self.zeros, self.top, self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.teaching:
            return self.linear(x)
        if self.order is not None:
            x = x.index_select(-1, self.order)
        y = F.linear(x.to(self.dtype), self.weight())
        y = y if self.linear.bias is None else y + self.linear.bias
        # In float32 there is no autocast to convert what comes after.
        return y.to(x.dtype) if self.dtype is torch.float32 else y

    @torch.no_grad()
    def packed(self) -> PackedWeight:
        """The weight as it is stored: `start` with the trained codes and step sizes."""
        codes = self.latent.round().clamp_(0, self.top).flatten(1)
        if self.order is not None:
            codes = codes[:, torch.argsort(self.order)]
        grid = Grid(stored_scales(self.steps), self.zeros, self.start.bits)
        return pack_weight(codes, grid, sym=self.start.zeros is None, g_idx=self.start.g_idx)
