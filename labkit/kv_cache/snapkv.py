"""SnapKV: a prompt is compressed to what its last queries look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit import _check
from labkit.kv_cache.evicting import gathered
from labkit.kv_cache.scores import attention_mass, heaviest, pooled
from labkit.kv_cache.watch import WatchedCache, WatchedLayer, plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from labkit.models import LoadedModel

_POSITION_BYTES = 4


class SnapKVCache(WatchedCache):
    """Compresses the prompt to `budget` tokens a KV head as it ends, by its last queries' votes (Li et al. 2024).

    The prompt is the first step that the cache sees. Its last `window` queries vote for the tokens before them with
    their attention, summed over queries and over the query heads of a KV head; a vote counts for `kernel_size`
    neighbours, as their highest (pooling "max") or their mean ("avg"). The budget - window best stay, and the window
    stays whole. Nothing is dropped afterwards: as in the paper the cache grows with every token generated, and with
    every later prompt. A prompt within the budget is left as it is. Keys stay at their true positions, and
    `get_seq_length()` goes on counting.
    kernel_size: heads that copy look one token ahead of what they have read, so that the voters name the words before
    an answer and not the answer; half the kernel has to reach over it. The paper's code averages over 5 or 7, which
    loses a number written a token a digit; hence 11 and the highest.
    model: needed for its queries, as for HeavyHitterCache, with the same hooks and the same limits; besides, a prompt
    in chunks is not known to be one: only its first chunk would be compressed.
    """

    def __init__(
        self,
        model: PreTrainedModel | LoadedModel,
        *,
        budget: int,
        window: int = 32,
        kernel_size: int = 11,
        pooling: str = "max",
    ) -> None:
        _check.integer("window", window, 1)
        _check.integer("budget", budget, window)
        _check.integer("kernel_size", kernel_size, 1)
        _check.require(kernel_size % 2 == 1, "kernel_size", kernel_size, "an odd number: as many neighbours either way")
        _check.choice("pooling", pooling, ("max", "avg"))
        self.budget, self.window, self.kernel_size, self.pooling = budget, window, kernel_size, pooling
        layers = plain(model).config.num_hidden_layers
        super().__init__(model, [SnapKVLayer(budget, window, kernel_size, pooling) for _ in range(layers)])

    def positions(self, layer_idx: int) -> Tensor:
        """Where in the text the tokens held stand, `(batch, num_key_value_heads, held)` int32."""
        return self.layers[layer_idx].positions

    def bytes_at(self, seq_len: int, *, prompt_length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that the cache takes after `seq_len` tokens, the prompt's included; `nbytes` is what it takes now."""
        _check.integer("prompt_length", prompt_length, 0, _check.integer("seq_len", seq_len, 0))
        held = min(prompt_length, self.budget) + seq_len - prompt_length
        return self._bytes(held, batch, dtype, per_token=_POSITION_BYTES)


class SnapKVLayer(WatchedLayer):
    """One layer of a SnapKVCache; positions are `(batch, num_key_value_heads, held)`."""

    tensors = ("keys", "values", "positions")

    def __init__(self, budget: int, window: int, kernel_size: int, pooling: str) -> None:
        super().__init__()
        self.budget, self.window, self.kernel_size, self.pooling = budget, window, kernel_size, pooling
        self.positions: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.positions = torch.empty(*key_states.shape[:2], 0, dtype=torch.int32, device=key_states.device)

    def kept_before(self, q_len: int) -> int:
        return self.held

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        self.require_watched()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        q_len = key_states.shape[-2]
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        at = torch.arange(self.seen, self.seen + q_len, dtype=torch.int32, device=key_states.device)
        self.positions = torch.cat([self.positions, at.expand(*key_states.shape[:2], q_len)], dim=2)
        self.seen += q_len
        return self.keys, self.values

    def observe(self, query: Tensor, scaling: float) -> None:
        is_prompt = query.shape[2] == self.seen
        if is_prompt and self.seen > self.budget:
            votes = attention_mass(query[:, :, -self.window :], self.keys, scaling)
            # The window itself is kept whatever it scores; its own scores must not spread into the prefix.
            prefix = pooled(votes[..., : -self.window], self.kernel_size, self.pooling)
            scores = torch.cat((prefix, votes[..., -self.window :]), dim=-1)
            index = heaviest(scores, self.budget, self.window)
            self._each(lambda x: gathered(x, index))
