"""What a cache holds, counted from its tensors and not from a formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from transformers import Cache


def cache_nbytes(cache: Cache) -> int:
    """Bytes of memory that the layers of any `transformers` cache hold: every tensor's whole storage, each once."""
    storages: dict[int, int] = {}
    for tensor in _tensors([vars(layer) for layer in cache.layers]):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(value: object) -> Iterable[torch.Tensor]:
    """The plain tensors in nested containers, of wrapped ones those that they wrap."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        yield from _tensors([getattr(value, name) for name in names])
    elif isinstance(value, torch.Tensor):
        yield value
    elif hasattr(value, "tensors") and isinstance(value.tensors, Mapping):
        yield from _tensors(value.tensors)
