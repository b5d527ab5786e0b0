"""What the checks ask of a tensor that a learner's function returns."""

import torch
from torch import Tensor

from labkit.exercises._exercise import expect


def as_tensor(value: object, shape: tuple[int, ...], what: str) -> Tensor:
    """`value` as a finite float64 tensor of that shape, detached; fails in words otherwise."""
    expect(isinstance(value, Tensor), f"{what} should be a torch tensor; got {type(value).__name__}")
    found = tuple(value.shape)
    expect(found == shape, f"{what} should have the shape {shape}; got {found}")
    bad = int((~torch.isfinite(value.detach())).sum())
    expect(bad == 0, f"{what} should be finite; {bad} of {value.numel()} values are NaN or infinite")
    return value.detach().to("cpu", torch.float64)


def normal(seed: int, *shape: int) -> Tensor:
    """Normal float32 values that are the same in each run, and leave torch's own generator alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
