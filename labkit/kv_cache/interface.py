"""What a decode step and a cache know of each other. `labkit.engine` steps; any cache with these methods serves it."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class StepInput:
    """Where one step's tokens stand. `slots (q_len,)` in the cache; `cos`, `sin (q_len, 1, head_dim)` of their
    positions; `kv_len` tokens to look at, the new ones included; `mask (q_len, kv_len)`, True where a query may look,
    or None where all may (`causal`: each up to itself); `tree_mask (q_len, q_len)`, the part of the mask that new
    tokens see of each other where they are a tree.

    Over rows of different lengths (`RaggedCache`): `slots (batch, q_len)`, `cos`, `sin (batch, q_len, 1, head_dim)`,
    `mask (batch, 1, q_len, kv_len)`, and `kv_len` is the longest row's."""

    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    kv_len: int
    mask: torch.Tensor | None
    causal: bool
    tree_mask: torch.Tensor | None = None


@runtime_checkable
class DecoderCache(Protocol):
    """A KV cache that `Decoder` runs over. Rows have one length; `length` changes between steps only.

    A cache may be able to do more, which is a protocol of its own: `RaggedCache`, `TreeCache`."""

    @property
    def batch(self) -> int:
        """Rows held; of no meaning while `length` is 0."""

    @property
    def length(self) -> int:
        """Tokens that each row holds."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, with all that goes with the keys and values."""

    def begin(self, tokens: torch.Tensor) -> int:
        """Forget every sequence and start `tokens (batch, prompt)`. Returns how many tokens of each row are at hand
        already (from a prefix cache), at most prompt - 1: the step begins after them."""

    def extend(self, tokens: torch.Tensor) -> None:
        """Make room for `tokens (batch, q_len)`, before their step. Raises, changing nothing, where there is none."""

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, at: StepInput) -> None:
        """Take the new `keys`, `values (batch, num_key_value_heads, q_len, head_dim)` of one layer."""

    def attend(self, layer_idx: int, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        """Attention of `query (batch, num_attention_heads, q_len, head_dim)` over what the layer now holds, new tokens
        included; the same shape. Holds no full-precision copy of the layer's keys or values."""

    def advance(self, q_len: int) -> None:
        """The step is done: each row holds `q_len` tokens more."""

    def crop_to(self, length: int) -> None:
        """Forget every token from `length` on, in all layers, those of a step that was not finished included."""


@runtime_checkable
class RaggedCache(DecoderCache, Protocol):
    """A `DecoderCache` whose rows may differ in length, as they do once a draft was accepted further in one than in
    another. `length` is then the longest row's, `crop_to` shortens the rows that are longer, `advance` adds to each."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each row holds."""

    @property
    def ragged(self) -> bool:
        """Whether rows differ now, so that a step's slots, positions and mask must be given by row."""

    def crop_rows_to(self, lengths: list[int]) -> None:
        """Forget every token of row b from `lengths[b]` on, which is at most what the row holds."""


@runtime_checkable
class TreeCache(Protocol):
    """A `DecoderCache` that can keep one path of a tree that was verified (`Decoder.keep`)."""

    def keep(self, starts: list[int], paths: list[list[int]]) -> None:
        """Of row b's tokens from `starts[b]` on, hold those at `starts[b] + i` for each i of `paths[b]`, which ascends,
        one after another, and forget the others. Rows end with one length, unless this is a `RaggedCache`."""


def attend_fresh(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, at: StepInput) -> torch.Tensor:
    """`attend` for a first prompt: over its own keys and values as they came, in one piece and not rounded."""
    return F.scaled_dot_product_attention(query, keys, values, at.mask, is_causal=at.causal, enable_gqa=True)


def length_after_crop(held: int, tokens_to_remove: int | torch.Tensor) -> int:
    """Tokens that `transformers`' `crop` leaves of `held`: all but the last `-tokens_to_remove`. A positive number is
    the length to keep, as 5.17 still takes it; 0 removes nothing. Some versions give a tensor of one number."""
    count = int(tokens_to_remove)
    return min(held, count) if count > 0 else max(0, held + count)
