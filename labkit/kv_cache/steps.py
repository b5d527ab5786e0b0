"""What a step may be: caches that refuse one that would leave them wrong, and the tokens of a tree that are none."""

import torch
from transformers import Cache

from labkit import _check


class StepCheckedCache(Cache):
    """A cache of `transformers` that refuses a step it cannot take, before any of its layers has changed.

    Left to itself it would be the model's layers that fail, or, worse, that read tokens of different steps: after an
    interrupt within a step the first layers hold it and the last ones do not.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `transformers` calls it. Errors: ValueError for a model of more layers, for other rows, heads or dtype
        than are held, and after a step that did not reach every layer."""
        count = len(self.layers)
        takes = f"a model of {count} layers, as the cache was made for"
        _check.require(layer_idx < count, "past_key_values", f"layer {layer_idx}", takes)
        if layer_idx == 0:
            first, last = self.layers[0].get_seq_length(), self.layers[-1].get_seq_length()
            got = f"{first} tokens in the first layer and {last} in the last"
            takes = "whole steps of one model; after one that was interrupted call reset() and give all tokens again"
            _check.require(first == last, "past_key_values", got, takes)
        _refuse_other_states(self.layers[layer_idx].keys, key_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _refuse_other_states(held: torch.Tensor | None, new: torch.Tensor) -> None:
    """Refuse new keys that do not go behind those held; a layer that holds none takes any."""
    if held is None or not held.numel():
        return
    kind = [(x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in (held, new)]
    (rows, heads, head_dim, dtype), (new_rows, new_heads, new_head_dim, new_dtype) = kind
    got = f"{new_rows} rows of {new_heads} KV heads of {new_head_dim} in {new_dtype}"
    takes = f"{rows} rows of {heads} KV heads of {head_dim} in {dtype}, as are held; or call reset() first"
    _check.require(kind[0] == kind[1], "past_key_values", got, takes)


def chain_length(tree_mask: torch.Tensor) -> int:
    """How many of the first tokens of a tree, bool `(q_len, q_len)`, stand in one line, as tokens of a text do."""
    numbers = torch.arange(1, len(tree_mask) + 1, device=tree_mask.device)
    return int((tree_mask.sum(-1) == numbers).int().cumprod(0).sum())
