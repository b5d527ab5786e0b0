"""H2O: the latest tokens and those that have been attended to most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit import _check
from labkit.kv_cache.evicting import gathered
from labkit.kv_cache.scores import attention_mass, heaviest
from labkit.kv_cache.watch import WatchedCache, WatchedLayer, plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from labkit.models import LoadedModel

# A float32 score and an int32 position for each token of each KV head.
_BOOKKEEPING_BYTES = 8


class HeavyHitterCache(WatchedCache):
    """Keeps `budget` tokens a KV head: the `recent` latest and the heaviest others (Zhang et al. 2023, algorithm 1).

    A token's weight is the attention that it has got so far from all queries, summed over the query heads that share
    its KV head. Every KV head chooses for itself, so that keys and values are `(batch, num_key_value_heads, budget,
    head_dim)` of different tokens a head. Keys stay at their true positions, and `get_seq_length()` goes on counting.
    What a step sees: before a step of q tokens the lightest go, and the latest give way first, until cache and step
    are at most `budget`; no query reads more. The heavy ones stay for a step longer than `recent`, such as a prompt:
    it is seen whole and causally, and cut to the budget as it ends.
    model: needed for its queries. Hooks on its attention modules act in calls with this cache only, hold it by a weak
    reference and go when it goes. recent: None for half of the budget, as in the paper.
    Limits: rows of equal length without padding (the mask shows it: ValueError); no crop, so no assisted decoding; no
    sliding windows, no compiled model, no other model than the one given. Beam search and deep copies work.
    """

    def __init__(self, model: PreTrainedModel | LoadedModel, *, budget: int, recent: int | None = None) -> None:
        _check.integer("budget", budget, 1)
        recent = budget // 2 if recent is None else _check.integer("recent", recent, 0, budget)
        self.budget, self.recent = budget, recent
        super().__init__(model, [HeavyHitterLayer(budget, recent) for _ in range(_layers(model))])

    def positions(self, layer_idx: int) -> Tensor:
        """Where in the text the tokens held stand, `(batch, num_key_value_heads, held)` int32."""
        return self.layers[layer_idx].positions

    def bytes_at(self, seq_len: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that the cache takes after `seq_len` tokens, scores included; `nbytes` is what it takes now."""
        held = min(_check.integer("seq_len", seq_len, 0), self.budget)
        return self._bytes(held, batch, dtype, per_token=_BOOKKEEPING_BYTES)


def _layers(model: PreTrainedModel | LoadedModel) -> int:
    return plain(model).config.num_hidden_layers


class HeavyHitterLayer(WatchedLayer):
    """One layer of a HeavyHitterCache; scores and positions are `(batch, num_key_value_heads, held)`."""

    tensors = ("keys", "values", "scores", "positions")

    def __init__(self, budget: int, recent: int) -> None:
        super().__init__()
        self.budget, self.recent = budget, recent
        self.scores: Tensor | None = None
        self.positions: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        shape, device = (*key_states.shape[:2], 0), key_states.device
        self.scores = torch.empty(shape, dtype=torch.float32, device=device)
        self.positions = torch.empty(shape, dtype=torch.int32, device=device)

    def kept_before(self, q_len: int) -> int:
        return min(self.held, max(self.budget - q_len, self.budget - self.recent))

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        self.require_watched()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        q_len = key_states.shape[-2]
        self._keep(self.kept_before(q_len), max(self.recent - q_len, 0))
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        shape = (*key_states.shape[:2], q_len)
        at = torch.arange(self.seen, self.seen + q_len, dtype=torch.int32, device=key_states.device)
        self.positions = torch.cat([self.positions, at.expand(shape)], dim=2)
        self.scores = torch.cat([self.scores, self.scores.new_zeros(shape)], dim=2)
        self.seen += q_len
        return self.keys, self.values

    def observe(self, query: Tensor, scaling: float) -> None:
        self.scores = self.scores + attention_mass(query, self.keys, scaling)
        self._keep(min(self.held, self.budget), self.recent)

    def _keep(self, total: int, recent: int) -> None:
        if total < self.held:
            index = heaviest(self.scores, total, min(recent, total))
            self._each(lambda x: gathered(x, index))
