"""The memory behind block ids: every layer's keys and values, in blocks, allocated once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.hardware import describe
from labkit.sizing import LlamaShape, kv_bytes_per_token

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TABLE_BYTES = 4


def paged_cache_bytes(
    config: PretrainedConfig,
    dtype: torch.dtype | str,
    *,
    num_blocks: int,
    block_size: int = 16,
    batch: int = 0,
    seq_len: int = 0,
) -> int:
    """Bytes of a `PagedKVCache`: its blocks, whatever they hold, and the block table of `batch` rows of `seq_len`."""
    slots = _check.integer("num_blocks", num_blocks, 1) * _check.integer("block_size", block_size, 1)
    return slots * kv_bytes_per_token(config, dtype) + TABLE_BYTES * batch * -(-seq_len // block_size)


def refuse_unless_it_fits(num_blocks: int, needed: int, device: torch.device) -> None:
    """Raise, with the numbers, where `num_blocks` that need so many bytes are more than the device has free."""
    free = describe(device).free_bytes
    most = free * num_blocks // needed
    takes = f"at most {most}: {needed / 1e9:.2f} GB would be needed and {free / 1e9:.2f} GB are free on {device}"
    _check.require(needed <= free, "num_blocks", num_blocks, takes)


def check_states(states: torch.Tensor, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse keys or values that are not `(batch, heads, q_len, head_dim)` of this dtype on this device."""
    fits = states.ndim == 4 and (states.shape[1], states.shape[3]) == (heads, head_dim)
    takes = f"(batch, {heads}, q_len, {head_dim}), as the cache's config says"
    _check.require(fits, "keys", f"shape {tuple(states.shape)}", takes)
    same = (states.dtype, states.device) == (dtype, device)
    _check.require(same, "keys", f"{states.dtype} on {states.device}", f"{dtype} on {device}, as the cache was made")


class PagedStorage:
    """`keys` and `values (num_layers, num_blocks, num_key_value_heads, block_size, head_dim)`.

    One block id stands for that block of every layer. Errors: ValueError, with the bytes, where it does not fit.
    """

    def __init__(
        self, config: PretrainedConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = LlamaShape.of(config)
        needed = paged_cache_bytes(config, dtype, num_blocks=num_blocks, block_size=block_size)
        refuse_unless_it_fits(num_blocks, needed, device)
        sizes = (shape.num_hidden_layers, num_blocks, shape.num_key_value_heads, block_size, shape.head_dim)
        # Not in inference mode, whose tensors nobody else may write to.
        with torch.inference_mode(False):
            self.keys = torch.zeros(sizes, dtype=dtype, device=device)
            self.values = torch.zeros(sizes, dtype=dtype, device=device)
        self.block_size = block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.keys.nbytes + self.values.nbytes

    def check(self, states: torch.Tensor) -> None:
        """Refuse keys or values that these blocks cannot hold."""
        check_states(states, self.keys.shape[2], self.keys.shape[4], self.keys.dtype, self.keys.device)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copy blocks of every layer, `(source, destination)` each, as copy on write asks for."""
        if copies:
            sources, destinations = torch.tensor(copies, device=self.keys.device).unbind(1)
            for stored in (self.keys, self.values):
                stored[:, destinations] = stored[:, sources]

    def write(
        self, layer_idx: int, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put `keys`, `values (batch, num_key_value_heads, q_len, head_dim)` at `offsets (q_len,)` of their
        `blocks (batch, q_len)`."""
        self.keys[layer_idx][blocks, :, offsets] = keys.detach().transpose(1, 2)
        self.values[layer_idx][blocks, :, offsets] = values.detach().transpose(1, 2)

    def gather(self, layer_idx: int, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A contiguous copy of the first `length` tokens of the rows of `table (batch, blocks)`, of one layer:
        keys and values `(batch, num_key_value_heads, length, head_dim)`."""

        def whole(stored: torch.Tensor) -> torch.Tensor:
            return stored[layer_idx][table].transpose(1, 2).flatten(2, 3)[:, :, :length]

        return whole(self.keys), whole(self.values)
