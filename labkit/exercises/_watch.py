"""What a check sees of the tensors that a learner's function makes: how many elements live at once, how wide they are.

PyTorch's dispatcher shows every tensor, however it was made; what is fused inside one operator shows as its name.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.exercises._exercise import expect

_FUSED = ("scaled_dot_product", "multi_head_attention", "flex_attention")


@dataclass
class Seen:
    """`peak`: most elements that lived at one moment, views counted once and what the function was given not at all;
    `shapes`: of floating tensors; `fused`: names of attention operators that were called."""

    peak: int = 0
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    fused: list[str] = field(default_factory=list)

    def operator(self, name: str) -> None:
        """Keep the name if it is one that computes attention whole."""
        if any(part in name for part in _FUSED):
            self.fused.append(name.removeprefix("aten."))


class _Operators(TorchFunctionMode):
    """Names of torch functions: on some devices F.scaled_dot_product_attention falls apart before it is dispatched."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.operator(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


class _Tensors(TorchDispatchMode):
    """Counts a storage from the first tensor on it until the last one is gone."""

    def __init__(self, seen: Seen, given: tuple[object, ...]) -> None:
        super().__init__()
        self.seen, self.living, self.live = seen, {}, 0
        self.given = {t.untyped_storage().data_ptr() for t in tree_leaves(given) if isinstance(t, Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.operator(str(func))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._made(tensor)
        return result

    def _made(self, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            self.seen.shapes.add(tuple(tensor.shape))
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes() // tensor.element_size()
        if at in self.given or not size:
            return
        if at not in self.living:
            self.living[at] = [0, size]
            self.live += size
            self.seen.peak = max(self.seen.peak, self.live)
        self.living[at][0] += 1
        weakref.finalize(tensor, self._gone, at)

    def _gone(self, at: int) -> None:
        self.living[at][0] -= 1
        if not self.living[at][0]:
            self.live -= self.living.pop(at)[1]


def watched(function: Callable[..., object], *args: object) -> tuple[object, Seen]:
    """What the function returns, and what was seen of its tensors."""
    seen = Seen()
    with _Operators(seen), _Tensors(seen, args):
        value = function(*args)
    return value, seen


def without_fused_attention(seen: Seen) -> None:
    """Fail if an operator computed attention whole: the point is to write it."""
    called = f"your function called {seen.fused[0]}" if seen.fused else ""
    expect(not seen.fused, f"write it yourself: {called}, which computes attention whole")
