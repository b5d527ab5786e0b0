"""What caches that forget have in common: tokens seen apart from tokens held, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicLayer

from labkit import _check
from labkit.kv_cache.steps import StepCheckedCache
from labkit.sizing import LlamaShape


def checked_shape(config: PretrainedConfig) -> LlamaShape:
    """The shape of a model whose past may be thinned out. Errors: ValueError for a family or a mask that may not."""
    shape = LlamaShape.of(config)
    sliding = [kind for kind in getattr(config, "layer_types", None) or () if kind != "full_attention"]
    takes = "full attention in every layer: a sliding window forgets by itself"
    _check.require(not sliding, "config", f"layer_types with {sliding[:1]}", takes)
    return shape


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """`x (batch, num_key_value_heads, seq_len, …)` at the tokens `index (batch, num_key_value_heads, n)`: a copy."""
    shape = (*index.shape, *x.shape[3:])
    return x.gather(2, index.view(*index.shape, *(1,) * (x.ndim - 3)).expand(shape))


class EvictingLayer(DynamicLayer):
    """One layer's keys and values, of which a step may drop some for good.

    keys, values: `(batch, num_key_value_heads, held, head_dim)`, never a view on a larger tensor. `seen` counts the
    tokens that ever came in; the model takes its position ids from it, so that keys keep the positions that they were
    rotated to. New tokens come last, which makes a causal mask over `held + q_len` columns the right one.
    """

    is_croppable = False
    # Every tensor of the layer, with rows along its first dimension.
    tensors: tuple[str, ...] = ("keys", "values")

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @property
    def held(self) -> int:
        """Tokens of each row that keys and values are there for."""
        return self.keys.shape[-2] if self.is_initialized else 0

    @property
    def nbytes(self) -> int:
        """Bytes that this layer keeps from being freed: of whole storages, so that a view would count in full."""
        found = (getattr(self, name) for name in self.tensors)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found if x is not None}
        return sum(storages.values())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        self.is_initialized = True

    def kept_before(self, q_len: int) -> int:
        """How many of the tokens held a step of `q_len` new ones still sees; the others go as it begins."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.kept_before(query_length)
        return kept + query_length, self.seen - kept

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens held: what position ids go on from."""
        return self.seen

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(
            f"tokens_to_remove: got {tokens_to_remove}; takes nothing: tokens that were evicted cannot come back, so "
            f"that this cache does not go back to an earlier length (as assisted decoding would have it)"
        )

    def reset(self) -> None:
        for name in self.tensors:
            setattr(self, name, None)
        self.is_initialized = False
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._each(lambda x: x[indices].clone())

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in self.tensors:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def offload(self) -> None:
        self._each(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._each(lambda x: x.to(self.device, non_blocking=True))


class EvictingCache(StepCheckedCache):
    """A `transformers` cache of EvictingLayers."""

    layers: list[EvictingLayer]
    is_croppable = False

    def __init__(self, config: PretrainedConfig, layers: list[EvictingLayer]) -> None:
        self._shape = checked_shape(config)
        super().__init__(layers=layers)

    @property
    def held(self) -> int:
        """Tokens of each row whose keys and values are there, per KV head."""
        return self.layers[0].held

    @property
    def nbytes(self) -> int:
        """Bytes that the cache keeps from being freed, over all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def _bytes(self, held: int, batch: int, dtype: torch.dtype, *, extra: int = 0, per_token: int = 0) -> int:
        """Of `held` tokens, `extra` keys beside them, and `per_token` bytes a token and KV head of bookkeeping."""
        _check.integer("batch", batch, 1)
        shape, itemsize = self._shape, _check.dtype("dtype", dtype).itemsize
        kv = (2 * held + extra) * shape.head_dim * itemsize
        return batch * shape.num_hidden_layers * shape.num_key_value_heads * (kv + held * per_token)
