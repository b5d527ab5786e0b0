"""What the tests of this folder share: a mode that notes the shape of every tensor that an operation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Made(TorchDispatchMode):
    """The most elements that any one operation gave a tensor of its own; a view allocates nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        for made in torch.utils._pytree.tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.numel())
        return out
