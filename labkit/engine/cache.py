"""The static KV cache: allocated once, written in place, cropped by moving its end."""

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig

from labkit import _check
from labkit.hardware import describe
from labkit.kv_cache.interface import DecoderCache, StepInput

# Up to so many queries a mask is made once for each head of a group; beyond, it would weigh more than it saves.
_FEW_QUERIES = 64


class StaticKVCache:
    """Keys and values of every layer, `(num_layers, batch, num_key_value_heads, max_length, head_dim)` each.

    `length` counts the tokens held; slots past it are free. Rows may differ in length (`crop_rows_to`, `keep`): then
    `length` is the longest one's. Errors: ValueError, with the bytes, where it does not fit.
    """

    def __init__(
        self, config: PretrainedConfig, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        _check.integer("batch", batch, 1)
        _check.integer("max_length", max_length, 1)
        dtype, device = _check.dtype("dtype", dtype), _check.device("device", device)
        shape = _shape(config, batch, max_length)
        _refuse_if_too_large(shape, dtype, device)
        self.keys, self.values = _new_storage(shape, dtype, device)
        self.batch, self.max_length = batch, max_length
        self._masked: tuple[StepInput, torch.Tensor] | None = None
        self._set_lengths([0] * batch)

    def _set_lengths(self, lengths: list[int]) -> None:
        self.length = max(lengths)
        # None where all rows have one length, which is what a step need not look at row by row.
        self._rows = lengths if min(lengths) < self.length else None

    @property
    def ragged(self) -> bool:
        """Whether rows differ in length."""
        return self._rows is not None

    @property
    def lengths(self) -> list[int]:
        """Tokens held of each row."""
        return list(self._rows or [self.length] * self.batch)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def begin(self, tokens: torch.Tensor) -> int:
        """Forget all; nothing of a prompt is at hand."""
        self.crop_to(0)
        return 0

    def extend(self, tokens: torch.Tensor) -> None:
        """Refuse `tokens (batch, q_len)` that would not fit; `Decoder` calls `grown` before."""
        _check.integer("tokens", tokens.shape[1], 0, self.max_length - self.length)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, at: StepInput) -> None:
        """Put `keys`, `values` `(batch, num_key_value_heads, q_len, head_dim)` at their slots."""
        if at.slots.ndim == 2:
            slots = at.slots[:, None, :, None].expand_as(keys)
            self.keys[layer_idx].scatter_(2, slots, keys)
            self.values[layer_idx].scatter_(2, slots, values)
            return
        self.keys[layer_idx].index_copy_(2, at.slots, keys)
        self.values[layer_idx].index_copy_(2, at.slots, values)

    def attend(self, layer_idx: int, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        """Attention of `query (batch, num_attention_heads, q_len, head_dim)` over the first `at.kv_len` slots.

        K and V are never repeated: the heads that share a KV head become the rows of one small attention, where there
        are few queries, as there are while decoding and verifying.
        """
        keys, values = self.keys[layer_idx, :, :, : at.kv_len], self.values[layer_idx, :, :, : at.kv_len]
        batch, heads, q_len, head_dim = query.shape
        if at.causal or q_len > _FEW_QUERIES:
            return F.scaled_dot_product_attention(query, keys, values, at.mask, is_causal=at.causal, enable_gqa=True)
        grouped = query.reshape(batch, keys.shape[1], -1, head_dim)
        mask = self._mask_by_group(at, heads // keys.shape[1], query.dtype)
        return F.scaled_dot_product_attention(grouped, keys, values, mask).reshape(batch, heads, q_len, head_dim)

    def _mask_by_group(self, at: StepInput, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask's rows once for each of a group's heads, as numbers to add, made once for all layers of a step."""
        if at.mask is None:
            return None
        if self._masked is None or self._masked[0] is not at:
            numbers = torch.zeros_like(at.mask, dtype=dtype).masked_fill_(~at.mask, -torch.inf)
            # One query's mask broadcasts over the group.
            self._masked = at, numbers if numbers.shape[-2] == 1 else torch.cat([numbers] * group, dim=-2)
        return self._masked[1]

    def advance(self, q_len: int) -> None:
        """Count `q_len` new tokens."""
        self._masked = None
        self.length += q_len
        if self._rows is not None:
            self._rows = [length + q_len for length in self._rows]

    def crop_to(self, length: int) -> None:
        """Forget every token from `length` on."""
        _check.integer("length", length, 0, self.length)
        if self._rows is not None:
            self._set_lengths([min(length, row) for row in self._rows])
        self.length = length

    def crop_rows_to(self, lengths: list[int]) -> None:
        """Forget every token of row b from `lengths[b]` on."""
        self._set_lengths(list(lengths))

    def keep(self, starts: list[int], paths: list[list[int]]) -> None:
        """Of row b's tokens from `starts[b]` on, hold those at `starts[b] + i` for each i of `paths[b]` alone."""
        rows, sources, targets = [], [], []
        for row, (start, path) in enumerate(zip(starts, paths, strict=True)):
            moved = [(start + i, start + place) for place, i in enumerate(path) if i != place]
            rows += [row] * len(moved)
            sources += [source for source, _ in moved]
            targets += [target for _, target in moved]
        # Until all have moved no row holds any of them: an interrupt leaves each with what is whole.
        self._set_lengths(list(starts))
        if rows:
            rows, sources, targets = torch.tensor([rows, sources, targets], device=self.keys.device)
            for stored in (self.keys, self.values):
                stored[:, rows, :, targets] = stored[:, rows, :, sources]
        self._set_lengths([start + len(path) for start, path in zip(starts, paths, strict=True)])

    def fill(self, length: int, seed: int = 0) -> None:
        """Hold `length` tokens of random keys and values: for timing, which does not depend on what they are."""
        _check.integer("length", length, 0, self.max_length)
        generator = torch.Generator(self.keys.device).manual_seed(_check.seed("seed", seed))
        for stored in (self.keys, self.values):
            # One row for all layers and sequences: drawing a billion numbers would take longer than what is timed.
            row = torch.randn(stored.shape[2], length, stored.shape[4], generator=generator, device=stored.device)
            stored[..., :length, :].copy_(row)
        self._set_lengths([length] * self.batch)

    def grown(self, max_length: int) -> "StaticKVCache":
        """A copy with room for `max_length` tokens."""
        _check.integer("max_length", max_length, self.max_length)
        larger = object.__new__(type(self))
        shape = (*self.keys.shape[:3], max_length, self.keys.shape[4])
        _refuse_if_too_large(shape, self.keys.dtype, self.keys.device)
        larger.keys, larger.values = _new_storage(shape, self.keys.dtype, self.keys.device)
        larger.keys[..., : self.length, :] = self.keys[..., : self.length, :]
        larger.values[..., : self.length, :] = self.values[..., : self.length, :]
        larger.batch, larger.max_length, larger._masked = self.batch, max_length, None
        larger._set_lengths(self.lengths)
        return larger


def _shape(config: PretrainedConfig, batch: int, max_length: int) -> tuple[int, ...]:
    """Of the keys, and of the values."""
    _check.require(isinstance(config, PretrainedConfig), "config", type(config).__name__, "a transformers config")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, batch, config.num_key_value_heads, max_length, head_dim


def check_cache(cache: object, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> DecoderCache:
    """Refuse a cache that does not hold the keys and values of this model."""
    takes = "None, a StaticKVCache or another cache that a Decoder can read, such as QuantizedCache or PagedKVCache"
    kind = f"the class {cache.__name__}" if isinstance(cache, type) else type(cache).__name__
    _check.require(isinstance(cache, DecoderCache) and not isinstance(cache, type), "cache", kind, takes)
    if not isinstance(cache, StaticKVCache):
        layers = len(cache.layers)
        wanted = config.num_hidden_layers
        _check.require(layers == wanted, "cache", f"a cache of {layers} layers", f"{wanted} layers, as the model has")
        return cache
    keys, wanted = cache.keys, _shape(config, cache.batch, cache.max_length)
    fits = (tuple(keys.shape), keys.dtype, keys.device) == (wanted, dtype, device)
    got = f"keys {tuple(keys.shape)} in {keys.dtype} on {keys.device}"
    _check.require(fits, "cache", got, f"keys {wanted} in {dtype} on {device}")
    return cache


def write_random(
    cache: DecoderCache, config: PretrainedConfig, batch: int, at: StepInput, *, dtype: torch.dtype, seed: int
) -> None:
    """Put random keys and values of the tokens that `at` places into every layer of an empty cache, the same in each:
    for timing. Errors: as the cache raises where there is no room."""
    layers, _, heads, length, head_dim = _shape(config, batch, at.kv_len)
    device = at.slots.device
    generator = torch.Generator(device).manual_seed(_check.seed("seed", seed))
    stored = torch.randn(batch, heads, length, head_dim, generator=generator, dtype=dtype, device=device)
    # Ids that no text has: a prefix cache must never find these keys and values under a prompt's.
    cache.extend(torch.full((batch, length), -1, device=device))
    for layer_idx in range(layers):
        cache.write(layer_idx, stored, stored, at)
    cache.advance(length)


def _new_storage(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros for keys and for values. A step makes them in inference mode, whose tensors nobody else may write to."""
    with torch.inference_mode(False):
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))


def _refuse_if_too_large(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    layers, batch, heads, max_length, head_dim = shape
    per_token = 2 * layers * heads * head_dim * dtype.itemsize
    needed, free = per_token * batch * max_length, describe(device).free_bytes
    if needed > free:
        raise ValueError(
            f"max_length: got {max_length} tokens for a batch of {batch}; takes at most {free // (per_token * batch)}: "
            f"the KV cache would need {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free on {device}"
        )
