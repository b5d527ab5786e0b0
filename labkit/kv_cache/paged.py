"""`PagedKVCache`: keys and values in blocks, shared where sequences are the same (PagedAttention)."""

import torch
from transformers import PretrainedConfig

from labkit import _check
from labkit.kernels import decode_attention
from labkit.kv_cache.blocks import BlockManager
from labkit.kv_cache.interface import StepInput, attend_fresh, length_after_crop
from labkit.kv_cache.paged_layer import PagedLayer
from labkit.kv_cache.paged_storage import PagedStorage
from labkit.kv_cache.steps import StepCheckedCache, chain_length


class PagedKVCache(StepCheckedCache):
    """Keys and values of every layer in `num_blocks` blocks of `block_size` tokens (Kwon et al., 2023), for
    `model.generate(past_key_values=cache)` and for `Decoder(model, cache=cache)`.

    All memory is allocated at once; a row takes blocks as it grows. Rows that began as one (beams, parallel samples)
    share blocks until they differ. With `Decoder`, which tells the token ids, a prompt that begins like an earlier one
    starts after the blocks that hold its beginning already (`prefix_caching`). Use one cache for one model.
    It can be cropped, so that it serves under speculative decoding. `transformers` is given one layer gathered at a
    time; `Decoder` reads through the block table. For inference: no gradient passes.
    Errors: ValueError for what does not fit; OutOfBlocks, in the middle of a generation, where blocks run out: the
    cache is then as it was before the step, and serves again after `reset()`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype | str,
        device: torch.device | str | None = None,
        prefix_caching: bool = True,
    ) -> None:
        _check.require(isinstance(config, PretrainedConfig), "config", type(config).__name__, "a model's config")
        self.dtype, self.device = _check.dtype("dtype", dtype), _check.device("device", device)
        self.storage = self._new_storage(config, num_blocks, block_size)
        self.manager = BlockManager(num_blocks, block_size, prefix_caching=prefix_caching)
        self._forget_rows()
        super().__init__(layers=[self._new_layer(layer_idx) for layer_idx in range(config.num_hidden_layers)])

    def _new_storage(self, config: PretrainedConfig, num_blocks: int, block_size: int) -> PagedStorage:
        return PagedStorage(config, num_blocks, block_size, self.dtype, self.device)

    def _new_layer(self, layer_idx: int) -> PagedLayer:
        return PagedLayer(self, layer_idx)

    def _forget_rows(self) -> None:
        self._rows: list[int] = []
        self._named = False  # whether the rows' token ids are known
        self._table = torch.empty(0, 0, dtype=torch.int32, device=self.device)
        self._begin = self._end = 0
        self._text = None  # how many tokens stand in one line, where others, a tree's, come after them
        self._fresh = None  # keys and values of a layer's first prompt, between `write` and `attend`

    @property
    def batch(self) -> int:
        """Rows held."""
        return len(self._rows)

    @property
    def length(self) -> int:
        """Tokens that each row holds in every layer: the last layer is the last to take a step's."""
        return self.layers[-1].length

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, whether in use or not, and of the block table."""
        return self.storage.nbytes + self._table.nbytes

    @property
    def rows(self) -> tuple[int, ...]:
        """The manager's id of each row's sequence."""
        return tuple(self._rows)

    def reset(self) -> None:
        """Forget every row. What the prefix cache knows stays there until its blocks are needed."""
        for row in self._rows:
            self.manager.free(row)
        self._forget_rows()
        self._set_length(0)

    def _set_length(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def begin(self, tokens: torch.Tensor) -> int:
        """Forget every row, and start `tokens (batch, prompt)` with what the prefix cache holds of all rows: returns
        how many tokens that is, whole blocks, at most prompt - 1."""
        prompts = tokens.tolist()
        self.reset()
        at_hand = min((self.manager.match(prompt) for prompt in prompts), default=0)
        self._rows = [self.manager.attach(prompt, at_hand) for prompt in prompts]
        self._named = True
        self._read_table(0)
        self._set_length(at_hand)
        return at_hand

    def extend(self, tokens: torch.Tensor) -> None:
        """Make room for `tokens (batch, q_len)`. Errors: OutOfBlocks, with the cache as it was."""
        if self._rows and self.manager.num_tokens(self._rows[0]) > self.length:
            self.crop_to(self.length)
        self._ensure_rows(tokens.shape[0], named=self._named or self.length == 0)
        self._make_room(self.length, tokens.shape[1], tokens.tolist() if self._named else None)

    def write(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor, at: StepInput) -> None:
        """Put `keys`, `values (batch, num_key_value_heads, q_len, head_dim)` into the blocks that `extend` took."""
        self.storage.check(keys)
        if layer_idx == 0 and at.tree_mask is not None:
            self._mark_tree(self._begin + chain_length(at.tree_mask))
        self._put(layer_idx, keys, values)
        self._fresh = None if self._begin else (keys, values)

    def attend(self, layer_idx: int, query: torch.Tensor, at: StepInput) -> torch.Tensor:
        """Attention of `query (batch, num_attention_heads, q_len, head_dim)`, read through the block table; of a first
        prompt, over its own keys and values, which are in one piece still."""
        if self._fresh is not None:
            (keys, values), self._fresh = self._fresh, None
            return attend_fresh(query, keys, values, at)
        keys, values = self.storage.keys[layer_idx], self.storage.values[layer_idx]
        seqlens = torch.full((len(self._rows),), self._end, dtype=torch.int32, device=self.device)
        return decode_attention(query, keys, values, seqlens, block_table=self._table, tree_mask=at.tree_mask)

    def advance(self, q_len: int) -> None:
        """Count `q_len` new tokens; blocks that they filled may be found by their prefix from now on, but for those of
        a tree: a branch reads other tokens than a text of its ids would."""
        self._fresh = None
        self._set_length(self.length + q_len)
        for row in self._rows:
            held = self.manager.num_tokens(row)
            self.manager.commit(row, held if self._text is None else min(self._text, held))

    def crop_to(self, length: int) -> None:
        """Forget every token from `length` on, those of an unfinished step included."""
        self._fresh = None
        self._set_length(_check.integer("length", length, 0, self.length))
        self._forget_tree(length)
        for row in self._rows:
            self.manager.truncate(row, min(length, self.manager.num_tokens(row)))
        self._end = min(self._end, length)
        self._table = self._table[:, : -(-length // self.manager.block_size)].contiguous()

    def _mark_tree(self, text: int) -> None:
        if self._text is None and text < self._end:
            self._text = text

    def _forget_tree(self, length: int) -> None:
        if self._text is not None and length <= self._text:
            self._text = None

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Forget the last `-tokens_to_remove` tokens (`length_after_crop`)."""
        self.crop_to(length_after_crop(self.length, tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was: its blocks are shared, and copied once the rows differ."""
        chosen = [self.manager.fork(self._rows[i]) for i in beam_idx.tolist()]
        for row in self._rows:
            self.manager.free(row)
        self._rows = chosen
        self._table = self._table.index_select(0, beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, as for parallel samples of one prompt; no block is copied yet."""
        self.reorder_cache(torch.arange(len(self._rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only the rows of `indices`, integers or a bool for each row."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def _ensure_rows(self, batch: int, *, named: bool) -> None:
        """Empty rows, where there are none of this kind: `named` ones are told their token ids."""
        if self.length == 0 and (batch, named) != (len(self._rows), self._named):
            self.reset()
            self._rows = [self.manager.allocate([] if named else 0) for _ in range(batch)]
            self._named = named
            self._read_table(0)
        _check.require(batch == len(self._rows), "keys", f"{batch} rows", f"{len(self._rows)} rows, as are held")
        takes = "a cache that no Decoder filled; or call reset() first"
        _check.require(named == self._named, "past_key_values", f"{self.length} tokens of a Decoder", takes)

    def _make_room(self, past: int, q_len: int, tokens: list[list[int]] | None = None) -> None:
        """Blocks for `q_len` tokens after `past` in every row; nothing to do where an earlier layer has asked."""
        held = self.manager.num_tokens(self._rows[0])
        if (self._begin, self._end) == (past, past + q_len) and held == self._end:
            return
        new = [q_len] * len(self._rows) if tokens is None else tokens
        copies = self.manager.append_all(dict(zip(self._rows, new, strict=True)))
        self.storage.copy_blocks(copies)
        self._begin, self._end = past, past + q_len
        if copies or self._end > self._table.shape[1] * self.manager.block_size:
            self._read_table(past // self.manager.block_size)

    def _read_table(self, begin: int) -> None:
        """Renew the table from column `begin` on; full blocks before it never change."""
        new = [self.manager.block_table(row)[begin:] for row in self._rows]
        tail = torch.tensor(new, dtype=torch.int32, device=self.device).reshape(len(new), len(new[0]))
        kept = self._table[:, :begin] if begin else tail[:, :0]
        self._table = torch.cat((kept, tail), dim=1)

    def _put(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        positions = torch.arange(self._begin, self._end, device=self.device)
        blocks = self._table[:, positions // self.manager.block_size].long()
        self.storage.write(layer_idx, blocks, positions % self.manager.block_size, keys, values)

    def _gathered(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.storage.gather(layer_idx, self._table, self._end)
