"""The memory behind block ids where blocks hold codes."""

import math
from collections.abc import Iterator

import torch
from transformers import PretrainedConfig

from labkit import _check
from labkit.kernels import kv_quantize
from labkit.kernels.types import QuantizedKV
from labkit.kv_cache.paged_storage import check_states, refuse_unless_it_fits
from labkit.kv_cache.sizing import NBITS, SCALE_BITS
from labkit.sizing import LlamaShape


def paged_quantized_bytes(config: PretrainedConfig, *, nbits: int, num_blocks: int, block_size: int = 32) -> int:
    """Bytes of the blocks of a `PagedQuantizedCache`: codes, and scales and minimums of 16 bits each."""
    shape = LlamaShape.of(config)
    _check.choice("nbits", _check.integer("nbits", nbits), NBITS)
    num_blocks, block_size = _check.integer("num_blocks", num_blocks, 1), _check.integer("block_size", block_size, 1)
    codes = 2 * block_size * shape.head_dim * nbits // 8
    groups = shape.head_dim + block_size * shape.head_dim // math.gcd(block_size, shape.head_dim)
    heads = shape.num_hidden_layers * num_blocks * shape.num_key_value_heads
    return heads * (codes + 2 * groups * SCALE_BITS // 8)


class QuantizedBlocks:
    """Codes, scales and minimums of every layer's blocks, allocated once.

    Keys share a scale along the tokens of a block in one channel; values along `group_size` channels of one token
    (KIVI, Liu et al., 2024, section 3). Errors: ValueError, with the bytes, where it does not fit.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        num_blocks: int,
        block_size: int,
        nbits: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = LlamaShape.of(config)
        needed = paged_quantized_bytes(config, nbits=nbits, num_blocks=num_blocks, block_size=block_size)
        refuse_unless_it_fits(num_blocks, needed, device)
        self.block_size, self.nbits = block_size, nbits
        self.heads, self.head_dim, self.dtype, self.device = shape.num_key_value_heads, shape.head_dim, dtype, device
        self.scales_dtype = torch.bfloat16 if dtype.itemsize > 2 else dtype
        self.group_size = math.gcd(block_size, shape.head_dim)
        layers = range(shape.num_hidden_layers)
        with torch.inference_mode(False):
            self._stored = [(self._blank(num_blocks, "channel"), self._blank(num_blocks, "token")) for _ in layers]

    def _blank(self, num_blocks: int, axis: str) -> QuantizedKV:
        size = (num_blocks, self.heads)
        codes = torch.zeros(
            *size, self.block_size, self.head_dim * self.nbits // 8, dtype=torch.uint8, device=self.device
        )
        by_channel = axis == "channel"
        grid = (1, self.head_dim) if by_channel else (self.block_size, self.head_dim // self.group_size)
        scales, minimums = (torch.zeros(*size, *grid, dtype=self.scales_dtype, device=self.device) for _ in range(2))
        group_size = self.block_size if by_channel else self.group_size
        return QuantizedKV(codes, scales, minimums, None, None, self.nbits, group_size, axis)

    def check(self, states: torch.Tensor) -> None:
        """Refuse keys or values that these blocks cannot hold."""
        check_states(states, self.heads, self.head_dim, self.dtype, self.device)

    def parts(self) -> Iterator[torch.Tensor]:
        """Every tensor that is kept."""
        for pair in self._stored:
            for stored in pair:
                yield from stored.tensors.values()

    def layer(self, layer_idx: int) -> tuple[QuantizedKV, QuantizedKV]:
        """Keys and values of one layer, by block."""
        return self._stored[layer_idx]

    def store(self, layer_idx: int, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Quantize `keys`, `values (batch, num_key_value_heads, n * block_size, head_dim)` into `blocks (batch, n)`."""
        ids = blocks.flatten().long()
        for stored, states in zip(self._stored[layer_idx], (keys, values), strict=True):
            whole = states.detach().unflatten(2, (-1, self.block_size)).transpose(1, 2).flatten(0, 1).contiguous()
            options = {"bits": self.nbits, "group_size": stored.group_size, "axis": stored.axis}
            new = kv_quantize(whole, scales_dtype=self.scales_dtype, **options)
            for name, tensor in new.tensors.items():
                getattr(stored, name)[ids] = tensor

    def gather(self, layer_idx: int, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the blocks of `table (batch, n)` in full precision: keys and values
        `(batch, num_key_value_heads, n * block_size, head_dim)`."""
        ids = table.flatten().long()

        def whole(stored: QuantizedKV) -> torch.Tensor:
            taken = stored.map(lambda tensor: tensor[ids]).dequantize(self.dtype)
            return taken.unflatten(0, table.shape).transpose(1, 2).flatten(2, 3)

        keys, values = self._stored[layer_idx]
        return whole(keys), whole(values)
