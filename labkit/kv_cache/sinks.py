"""StreamingLLM: the first tokens and the latest, so that a text may go on without end in a cache of one size."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from labkit import _check
from labkit.kv_cache.evicting import EvictingCache, EvictingLayer, checked_shape

# Rotations whose frequencies do not hang on the length of the text, so that one turn moves a key by n positions.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class SinkCache(EvictingCache):
    """Keeps the first `num_sink_tokens` and the latest tokens, `window_length` in all (Xiao et al. 2024, section 3.2).

    With num_sink_tokens=0 it is the plain sliding window, which ruins a model once the first tokens are gone.
    Positions: the latest tokens' keys stay where they are; the sinks' keys are turned forward by the number of tokens
    evicted, so that they stand directly before the window. Since rotary attention reads only distances, this is the
    paper's numbering within the cache. The turn always starts from the sinks' own keys, kept beside the others: it
    gathers no rounding.
    What a step sees: before a step of q tokens the oldest of the window go until sinks, window and step are at most
    window_length, so that no query reads more. A step longer than window_length - num_sink_tokens, such as a prompt,
    is seen whole and causally, after the sinks alone, and is cut to the window as it ends; feed it in chunks
    (`generate(prefill_chunk_size=…)`) for the window to hold within the prompt too.
    Limits: this cache never sees the attention mask. It takes one row, or rows without padding if `equal_lengths`
    says so; beam search then works. It cannot be cropped (no assisted decoding).
    Errors: ValueError for a model with sliding layers or of another family than `labkit.sizing` knows, for rotary
    frequencies that change with the length ("dynamic", "longrope"), and, in a step, for rows not announced.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        window_length: int,
        num_sink_tokens: int = 4,
        equal_lengths: bool = False,
    ) -> None:
        _check.integer("num_sink_tokens", num_sink_tokens, 0)
        _check.integer("window_length", window_length, num_sink_tokens + 1)
        turn = _Turn(config)
        layers = [
            SinkLayer(window_length, num_sink_tokens, turn, equal_lengths) for _ in range(config.num_hidden_layers)
        ]
        super().__init__(config, layers)
        self.window_length, self.num_sink_tokens = window_length, num_sink_tokens

    def bytes_at(self, seq_len: int, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
        """Bytes that the cache takes after `seq_len` tokens; `nbytes` is what it takes now."""
        full = _check.integer("seq_len", seq_len, 0) > self.window_length
        extra = self.num_sink_tokens if full else 0
        return self._bytes(min(seq_len, self.window_length), batch, dtype, extra=extra)


class SinkLayer(EvictingLayer):
    """One layer of a SinkCache. `sink_keys` are the sinks' keys as they came in, from the first eviction on."""

    tensors = ("keys", "values", "sink_keys")

    def __init__(self, window_length: int, num_sink_tokens: int, turn: _Turn, equal_lengths: bool) -> None:
        super().__init__()
        self.window_length, self.num_sink_tokens, self.equal_lengths = window_length, num_sink_tokens, equal_lengths
        self.sink_keys: Tensor | None = None
        self._turn = turn

    def kept_before(self, q_len: int) -> int:
        return min(self.held, max(self.window_length - q_len, self.num_sink_tokens))

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        self._refuse_rows(key_states.shape[0])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept = self.kept_before(key_states.shape[-2])
        keys = torch.cat([*self._kept_keys(kept), key_states], dim=2)
        values = torch.cat([*self._kept_values(kept), value_states], dim=2)
        self.keys, self.values = keys, values
        self.seen += key_states.shape[-2]
        if self.held > self.window_length:
            last = torch.cat(self._kept_keys(self.window_length), dim=2)
            self.values = torch.cat(self._kept_values(self.window_length), dim=2)
            self.keys = last
        return keys, values

    def _refuse_rows(self, rows: int) -> None:
        takes = "one row, or rows without padding and equal_lengths=True: a padded row's sinks would be its padding"
        _check.require(rows == 1 or self.equal_lengths, "past_key_values", f"SinkCache with {rows} rows", takes)

    def _kept_keys(self, kept: int) -> list[Tensor]:
        """The keys of `kept` tokens, sinks first and as they stand before the window."""
        if kept == self.held:
            return [self.keys]
        if self.sink_keys is None:
            self.sink_keys = self.keys[:, :, : self.num_sink_tokens].clone()
        sinks = self._turn(self.sink_keys, self.seen - kept)
        return [sinks, self.keys[:, :, self.held - kept + self.num_sink_tokens :]]

    def _kept_values(self, kept: int) -> list[Tensor]:
        if kept == self.held:
            return [self.values]
        tail = self.held - kept + self.num_sink_tokens
        return [self.values[:, :, : self.num_sink_tokens], self.values[:, :, tail:]]


class _Turn:
    """Turns keys that are rotated already by `shift` positions more; rotations of one plane add up."""

    def __init__(self, config: PretrainedConfig) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        shape = checked_shape(config)
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        takes = f"a rope_type among {', '.join(_ROPE_TYPES)}: others change their frequencies with the length"
        _check.require(kind in _ROPE_TYPES, "config", f"rope_type {kind!r}", takes)
        # Scaled as the model's own are (llama3, yarn); its factor on cos and sin is in the keys already.
        self._frequencies = LlamaRotaryEmbedding(config).inv_freq.double()
        found = 2 * self._frequencies.numel()
        takes = f"rotary embedding over the whole head of {shape.head_dim}"
        _check.require(found == shape.head_dim, "config", f"rotary embedding over {found} channels", takes)
        self._last: tuple[object, Tensor, Tensor] | None = None

    def __call__(self, keys: Tensor, shift: int) -> Tensor:
        cos, sin = self._angles(shift, keys.device)
        first, second = keys.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(keys.dtype)

    def _angles(self, shift: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin `(head_dim / 2,)`; all layers of a step ask for the same."""
        if self._last is None or self._last[0] != (shift, device):
            # On the device, so that no step waits for a copy; in float64, or a long text's angles would be rounded.
            self._frequencies = self._frequencies.to(device)
            angles = shift * self._frequencies
            self._last = (shift, device), angles.cos().float(), angles.sin().float()
        return self._last[1:]
