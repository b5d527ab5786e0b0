"""One layer of a KV cache of 8, 4 or 2 bits: keys by channel, values by token, recent tokens in full precision.

After KIVI (Liu et al., 2024, arXiv 2402.02750, section 3): a few channels of the keys are large at every token, so that
keys share a scale along the tokens of one channel; values show no such thing and share it along a token's channels,
which lets each token be quantized on its own. Keys therefore wait until a group of tokens is complete.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from labkit import _check
from labkit.kernels import decode_attention, kv_quantize
from labkit.kernels.types import QuantizedKV
from labkit.kv_cache.interface import StepInput, attend_fresh, length_after_crop
from labkit.kv_cache.sizing import quantized_tokens


class QuantizedLayer(CacheLayerMixin):
    """Keys and values of one layer: `old_keys` and `old_values` quantized, `keys` and `values` the recent tokens,
    `(batch, num_key_value_heads, recent, head_dim)` in the model's dtype."""

    is_croppable = True

    def __init__(self, heads: int, head_dim: int, nbits: int, q_group_size: int, residual_length: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.nbits, self.q_group_size, self.residual_length = nbits, q_group_size, residual_length
        self.reset()

    def reset(self) -> None:
        """Forget everything, and free it."""
        self.keys = self.values = self.old_keys = self.old_values = self.counts = self.fresh = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take dtype, device and rows from the first keys."""
        got, wanted = tuple(key_states.shape), f"(batch, {self.heads}, q_len, {self.head_dim})"
        fits = key_states.ndim == 4 and (got[1], got[3]) == (self.heads, self.head_dim)
        _check.require(fits, "key_states", f"shape {got}", f"{wanted}, as the cache's config says")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (states[:, :, :0].contiguous() for states in (key_states, value_states))
        self.is_initialized = True

    @property
    def n_quantized(self) -> int:
        """Tokens of each row that are quantized."""
        return 0 if self.old_keys is None else self.old_keys.codes.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept between two steps."""
        tensors = (self.keys, self.values, self.old_keys, self.old_values, self.counts)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def get_seq_length(self) -> int:
        """Tokens held of each row."""
        return self.n_quantized + (self.keys.shape[2] if self.is_initialized else 0)

    def get_max_length(self) -> int:
        """No most."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a step of `query_length` tokens looks at, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Hold new tokens, and quantize what has become old: whole groups before the last `residual_length` tokens.

        Tokens that come together do not make each other old, since they may be taken back, but for a prompt's, which
        would otherwise stay in full precision until the next step.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        settled = past or key_states.shape[2] - 1
        due = quantized_tokens(settled, self.q_group_size, self.residual_length) - self.n_quantized
        keys, old_keys = _split(torch.cat((self.keys, key_states), dim=2), due)
        values, old_values = _split(torch.cat((self.values, value_states), dim=2), due)
        if due > 0:
            options = {"bits": self.nbits, "group_size": self.q_group_size}
            self._hold(
                _joined(self.old_keys, kv_quantize(old_keys.detach(), axis="channel", **options)),
                _joined(self.old_values, kv_quantize(old_values.detach(), axis="token", **options)),
            )
        # Last: where quantizing is interrupted or finds no memory, no token is lost.
        self.keys, self.values = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hold new tokens and return all keys and all values, as `transformers` wants them: one layer dequantized. A
        first prompt gets back its own, not yet rounded."""
        first = self.get_seq_length() == 0
        self.append(key_states, value_states)
        if first:
            return key_states, value_states
        return self._whole(self.old_keys, self.keys), self._whole(self.old_values, self.values)

    def _whole(self, old: QuantizedKV | None, recent: torch.Tensor) -> torch.Tensor:
        return recent if old is None else torch.cat((old.dequantize(self.dtype), recent), dim=2)

    def attend(self, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        """Attention over the codes where they lie; over a first prompt's own keys and values, not yet rounded."""
        if self.fresh is not None:
            (keys, values), self.fresh = self.fresh, None
            return attend_fresh(query, keys, values, at)
        seqlens = torch.full((query.shape[0],), self.get_seq_length(), dtype=torch.int32, device=self.device)
        keys, values = self._readable(self.old_keys, self.keys), self._readable(self.old_values, self.values)
        return decode_attention(query, keys, values, seqlens, tree_mask=at.tree_mask)

    def _readable(self, old: QuantizedKV | None, recent: torch.Tensor) -> torch.Tensor | QuantizedKV:
        return recent if old is None else replace(old, recent=recent, n_quantized=self.counts)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Forget the last `-tokens_to_remove` tokens (`length_after_crop`)."""
        self.crop_to(length_after_crop(self.get_seq_length(), tokens_to_remove))

    def crop_to(self, length: int) -> None:
        """Forget tokens from `length` on. Recent ones go exactly; where that cuts a group of quantized keys, what is
        left of the group is recent again, rounded as it is."""
        self.fresh = None
        if length >= self.get_seq_length():
            return
        if length <= 0:
            self.reset()
            return
        kept = min(self.n_quantized, length) // self.q_group_size * self.q_group_size
        if kept < self.n_quantized and length < self.n_quantized:
            cut = slice(kept, kept + self.q_group_size)
            self.keys, self.values = (
                _tokens(old, cut).dequantize(self.dtype) for old in (self.old_keys, self.old_values)
            )
            self._hold(*(_tokens(old, slice(0, kept)) for old in (self.old_keys, self.old_values)))
        recent = length - self.n_quantized
        self.keys, self.values = self.keys[:, :, :recent].clone(), self.values[:, :, :recent].clone()

    def recent_at(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recent keys and values of each row at `index (batch, n)`, in memory of their own."""
        index = index[:, None, :, None].expand(-1, self.heads, -1, self.head_dim)
        return self.keys.gather(2, index), self.values.gather(2, index)

    def _hold(self, old_keys: QuantizedKV, old_values: QuantizedKV) -> None:
        """Keep these quantized tokens; none of them is None."""
        batch, _, count, _ = old_keys.codes.shape
        self.old_keys, self.old_values = (old_keys, old_values) if count else (None, None)
        self.counts = torch.full((batch,), count, dtype=torch.int32, device=self.device) if count else None

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.is_initialized:
            return
        self.keys, self.values = change(self.keys), change(self.values)
        if self.old_keys is not None:
            self._hold(self.old_keys.map(change), self.old_values.map(change))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows of `indices`."""
        self._change_rows(lambda rows: rows[indices])

    def offload(self) -> None:
        """Refused: what is small need not be moved."""
        raise NotImplementedError("a quantized cache is not offloaded to the CPU")

    prefetch = offload


def _split(states: torch.Tensor, due: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that stay recent, in memory of their own, and the first `due`."""
    if due <= 0:
        return states, states[:, :, :0]
    return states[:, :, due:].clone(), states[:, :, :due]


def _per_token(old: QuantizedKV, name: str) -> int:
    """Tokens that one entry of a tensor of `old` stands for."""
    return old.group_size if old.axis == "channel" and name != "codes" else 1


def _joined(old: QuantizedKV | None, new: QuantizedKV) -> QuantizedKV:
    """`new` after `old`."""
    if old is None:
        return new
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in ("codes", "scales", "minimums"))
    return replace(old, **{name: torch.cat((before, after), dim=2) for name, before, after in pairs})


def _tokens(old: QuantizedKV, which: slice) -> QuantizedKV:
    """Whole groups of tokens of `old`, in memory of their own."""

    def cut(name: str) -> torch.Tensor:
        per = _per_token(old, name)
        return getattr(old, name)[:, :, which.start // per : which.stop // per].clone()

    return replace(old, **{name: cut(name) for name in ("codes", "scales", "minimums")})
