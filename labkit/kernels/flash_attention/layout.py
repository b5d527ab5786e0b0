"""How tensors reach the kernels, forward and backward: by pointers, or by descriptors for Hopper's copy engine."""

import math
from functools import cache

import torch

LOG2_E = math.log2(math.e)


@cache
def capability(device: torch.device) -> int:
    """As `sm_<capability>`; where there is no GPU a Hopper's, whose kernel has both forms."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def last_together(x: torch.Tensor) -> torch.Tensor:
    """x with its channels side by side: itself, or a copy."""
    return x if x.stride(3) == 1 else x.contiguous()


def can_describe(*tensors: torch.Tensor) -> bool:
    """Whether Hopper's copy engine can read these: from multiples of 16 bytes on, and no row twice."""
    return all(
        x.data_ptr() % 16 == 0 and all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
        for x in tensors
    )


def describe(x: torch.Tensor, rows: int, padded: int) -> object:
    """A descriptor of tiles `(1, 1, rows, padded)`, which the host makes: no memory on the GPU is asked for."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded])
