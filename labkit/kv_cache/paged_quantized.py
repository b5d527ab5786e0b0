"""`PagedQuantizedCache`: blocks of codes. A block is quantized once it is full and no longer recent."""

from dataclasses import replace

import torch
from transformers import PretrainedConfig

from labkit import _check
from labkit.kernels import decode_attention
from labkit.kv_cache.interface import StepInput
from labkit.kv_cache.paged import PagedKVCache
from labkit.kv_cache.paged_layer import PagedLayer
from labkit.kv_cache.quantized_blocks import QuantizedBlocks
from labkit.kv_cache.sizing import NBITS, quantized_tokens


class PagedQuantizedLayer(PagedLayer):
    """Beside its share of the blocks, the recent `keys`, `values (batch, num_key_value_heads, recent, head_dim)`;
    before these come `n_quantized` tokens of each row, in blocks."""

    n_quantized = 0

    @property
    def held(self) -> int:
        """Tokens of each row, those of an unfinished step included."""
        return self.n_quantized + (0 if self.keys is None else self.keys.shape[2])

    def forget(self) -> None:
        """Hold nothing."""
        self.keys = self.values = None
        self.n_quantized = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold new tokens as they are."""
        held, keys, values = self.keys is not None, keys.detach(), values.detach()
        self.keys = torch.cat((self.keys, keys), dim=2) if held else keys.clone()
        self.values = torch.cat((self.values, values), dim=2) if held else values.clone()

    def drop_oldest(self, count: int) -> None:
        """The first `count` recent tokens are in blocks from now on; the rest gets memory of its own."""
        self.keys, self.values = self.keys[:, :, count:].clone(), self.values[:, :, count:].clone()
        self.n_quantized += count

    def keep(self, count: int) -> None:
        """Only the first `count` recent tokens."""
        if self.keys is not None:
            self.keys, self.values = self.keys[:, :, :count].clone(), self.values[:, :, :count].clone()


class PagedQuantizedCache(PagedKVCache):
    """A `PagedKVCache` whose blocks hold 8, 4 or 2 bits a number.

    The last `residual_length` tokens of each row, and up to `block_size` more that do not fill a block, stay in full
    precision beside the blocks. A first prompt attends to its own keys and values before they are rounded; one that
    goes on from the prefix cache reads what was rounded. Where `crop` cuts a quantized block in two, what is left of it
    is recent again, rounded as it is. Errors: as `PagedKVCache`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        nbits: int = 4,
        *,
        num_blocks: int,
        block_size: int = 32,
        residual_length: int = 32,
        dtype: torch.dtype | str,
        device: torch.device | str | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.nbits = _check.choice("nbits", _check.integer("nbits", nbits), NBITS)
        self.residual_length = _check.integer("residual_length", residual_length, 0)
        options = {"num_blocks": num_blocks, "block_size": block_size, "dtype": dtype, "device": device}
        super().__init__(config, prefix_caching=prefix_caching, **options)

    def _new_storage(self, config: PretrainedConfig, num_blocks: int, block_size: int) -> QuantizedBlocks:
        return QuantizedBlocks(config, num_blocks, block_size, self.nbits, self.dtype, self.device)

    def _new_layer(self, layer_idx: int) -> PagedQuantizedLayer:
        return PagedQuantizedLayer(self, layer_idx)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks with their scales and minimums, of the recent tokens and of the block table."""
        recent = (tensor for layer in self.layers for tensor in (layer.keys, layer.values))
        kept = (*self.storage.parts(), *recent, self._table)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def _forget_rows(self) -> None:
        super()._forget_rows()
        self._ids: list[list[int]] = []
        for layer in getattr(self, "layers", ()):
            layer.forget()

    def begin(self, tokens: torch.Tensor) -> int:
        at_hand = super().begin(tokens)
        self._ids = tokens[:, :at_hand].tolist()
        for layer in self.layers:
            layer.n_quantized = at_hand
        return at_hand

    def extend(self, tokens: torch.Tensor) -> None:
        if self.length == 0:  # whatever an unfinished prompt has left behind
            self.reset()
        elif self.layers[0].held > self.length:
            self.crop_to(self.length)
        self._ensure_rows(tokens.shape[0], named=self._named or self.length == 0)
        self._make_room(self.length, tokens.shape[1], tokens.tolist() if self._named else None)

    def _make_room(self, past: int, q_len: int, tokens: list[list[int]] | None = None) -> None:
        """Blocks for what this step makes old: the manager's sequences are the quantized tokens.

        Tokens that come together do not make each other old, since they may be taken back, but for a first prompt's.
        """
        held, size = self.manager.num_tokens(self._rows[0]), self.manager.block_size
        due = quantized_tokens(past or q_len - 1, size, self.residual_length)
        known = [[*ids[:past], *new] for ids, new in zip(self._ids, tokens, strict=True)] if tokens else []
        new = [ids[held:due] for ids in known] or [max(0, due - held)] * len(self._rows)
        if due > held:
            self.manager.append_all(dict(zip(self._rows, new, strict=True)))
            self._read_table(held // size)
        self._ids, self._begin, self._end = known, past, past + q_len

    def _ensure_rows(self, batch: int, *, named: bool) -> None:
        super()._ensure_rows(batch, named=named)
        if named and not self._ids:
            self._ids = [[] for _ in range(batch)]

    def _put(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        layer, size = self.layers[layer_idx], self.manager.block_size
        layer.append(keys, values)
        due = quantized_tokens(self._begin or self._end - 1, size, self.residual_length)
        count = due - layer.n_quantized
        if count > 0:
            blocks = self._table[:, layer.n_quantized // size : due // size]
            self.storage.store(layer_idx, blocks, layer.keys[:, :, :count], layer.values[:, :, :count])
            # Not before: where quantizing is interrupted or finds no memory, no token is lost.
            layer.drop_oldest(count)

    def attend(self, layer_idx: int, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        layer = self.layers[layer_idx]
        if self._fresh is not None:
            return super().attend(layer_idx, query, at)
        seqlens = torch.full((len(self._rows),), self._end, dtype=torch.int32, device=self.device)
        if not layer.n_quantized:
            return decode_attention(query, layer.keys, layer.values, seqlens, tree_mask=at.tree_mask)
        counts = torch.full_like(seqlens, layer.n_quantized)
        keys, values = self.storage.layer(layer_idx)
        keys = replace(keys, recent=layer.keys, n_quantized=counts)
        values = replace(values, recent=layer.values, n_quantized=counts)
        return decode_attention(query, keys, values, seqlens, block_table=self._table, tree_mask=at.tree_mask)

    def _gathered(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        if not layer.n_quantized:
            return layer.keys, layer.values
        keys, values = self._old(layer_idx, 0, layer.n_quantized)
        return torch.cat((keys, layer.keys), dim=2), torch.cat((values, layer.values), dim=2)

    def _old(self, layer_idx: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantized tokens `begin` (where a block begins) to `end` in full precision."""
        size = self.manager.block_size
        both = self.storage.gather(layer_idx, self._table[:, begin // size : -(-end // size)])
        return tuple(states[:, :, : end - begin].clone() for states in both)

    def crop_to(self, length: int) -> None:
        """Forget every token from `length` on, those of an unfinished step included."""
        self._fresh = None
        self._set_length(_check.integer("length", length, 0, self.length))
        self._forget_tree(length)
        size = self.manager.block_size
        kept = length // size * size
        for layer_idx, layer in enumerate(self.layers):
            if length < layer.n_quantized:
                layer.keys, layer.values = self._old(layer_idx, kept, length) if length > kept else (None, None)
                layer.n_quantized = kept
            else:
                layer.keep(length - layer.n_quantized)
        for row in self._rows:
            self.manager.truncate(row, min(kept, self.manager.num_tokens(row)))
        self._ids = [ids[:length] for ids in self._ids]
        self._end = min(self._end, length)
        self._table = self._table[:, : kept // size].contiguous()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: blocks are shared, the recent tokens copied."""
        super().reorder_cache(beam_idx)
        chosen = beam_idx.tolist()
        self._ids = [list(self._ids[i]) for i in chosen] if self._ids else []
        for layer in self.layers:
            if layer.keys is not None:
                layer.keys, layer.values = (
                    x.index_select(0, beam_idx.to(x.device)) for x in (layer.keys, layer.values)
                )
