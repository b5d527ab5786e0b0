"""What the forms of a weight, a key and a value share."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Self

import torch


class TensorFields:
    """A frozen dataclass, of whose fields some are tensors."""

    __slots__ = ()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that it is made of, by field."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        """Bytes of all of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with each tensor changed, such as moved to a device."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors.items()})
