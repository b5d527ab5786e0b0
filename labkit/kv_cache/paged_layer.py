"""What `transformers` asks of one layer of a cache whose keys and values lie in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from labkit.kv_cache.paged import PagedKVCache


class PagedLayer(CacheLayerMixin):
    """One layer's share of the blocks: what `transformers` asks of a layer. It holds no tensor of its own."""

    is_croppable = True

    def __init__(self, cache: PagedKVCache, layer_idx: int) -> None:
        super().__init__()
        self.cache, self.layer_idx, self.length = cache, layer_idx, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Refuse keys of another model; the blocks are there already."""
        self.cache.storage.check(key_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens into blocks and return all keys and values of this layer, gathered into one piece, since
        that is what `transformers` wants; the copy lives as long as the layer's attention. `Decoder` reads the blocks.

        Errors: OutOfBlocks, from the first layer of a step, with the cache as it was.
        """
        self.lazy_initialization(key_states, value_states)
        past, q_len = self.length, key_states.shape[2]
        self.cache._ensure_rows(key_states.shape[0], named=False)
        self.cache._make_room(past, q_len)
        self.cache._put(self.layer_idx, key_states, value_states)
        self.length += q_len
        return self.cache._gathered(self.layer_idx) if past else (key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens held of each row."""
        return self.length

    def get_max_length(self) -> int:
        """No most for one row: blocks are for all."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a step of `query_length` tokens looks at, and the position of the first."""
        return self.length + query_length, 0

    def offload(self) -> None:
        """Refused: a layer has no tensor of its own to move."""
        raise NotImplementedError("a paged cache is not offloaded to the CPU")

    prefetch = offload
