"""`Decoder`: prefill, then one token at a time, over a KV cache; on a GPU, over a static one, from a CUDA graph."""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from labkit import _check
from labkit.engine.arguments import (
    Lengths,
    check_cuda_graph,
    check_keeps_trees,
    check_lengths,
    check_paths,
    check_ragged,
    check_streamer,
    check_tokens,
)
from labkit.engine.cache import StaticKVCache, check_cache, write_random
from labkit.engine.generation import GenerationResult, continue_prompt
from labkit.engine.graph import MAX_TOKENS, DecodeGraphs
from labkit.engine.placement import rotary_table, step_input
from labkit.engine.sampling import check_sampling, sample, seeded_generator, stop_ids
from labkit.engine.step import check_model, collect_ops, no_mark, run_step
from labkit.engine.turns import Turn, one_at_a_time
from labkit.kv_cache.interface import DecoderCache
from labkit.models import LoadedModel, plain_model

__all__ = ["Decoder", "GenerationResult"]

# A cache grows by whole blocks of this many tokens, so that a generation that goes on does not copy it at every call.
_GROWTH = 256


class Decoder:
    """Runs a Llama-family `transformers` model (or a `LoadedModel`) step by step.

    `cache`: a static one, made and grown as needed, unless one is given: static, or any `DecoderCache`, which a step
    reads where it lies (quantized values, blocks). `cuda_graph` None means: where there is a GPU and the cache is
    static. The model's modules are looked up here, once: after replacing some (quantizing in place), make a new
    Decoder; hooks on them are not called. Errors: ValueError for a model whose step this does not compute exactly.
    """

    def __init__(
        self,
        model: PreTrainedModel | LoadedModel,
        *,
        cache: DecoderCache | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        self.model = check_model(plain_model(model))
        self._ops = collect_ops(self.model)
        self.turn = Turn()  # for whoever takes several steps that belong together
        # Of the first parameter that is a number still: packed weights have no dtype to compute in.
        self.device, self.dtype = self.model.device, self.model.dtype
        self._graphs = DecodeGraphs() if check_cuda_graph(cuda_graph, cache, self.device) else None
        self.cache: DecoderCache | None = None
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        if cache is not None:
            self._adopt(check_cache(cache, self.model.config, dtype=self.dtype, device=self.device))

    @property
    def length(self) -> int:
        """Tokens held in the cache, of the longest row."""
        return self.cache.length if self.cache else 0

    @property
    def lengths(self) -> list[int]:
        """Tokens held of each row, `(batch,)`."""
        if self._ragged:
            return self.cache.lengths
        return [self.cache.length] * self.cache.batch if self.cache else []

    @property
    def _ragged(self) -> bool:
        """Whether rows differ in length now; only a `RaggedCache` can say so."""
        return getattr(self.cache, "ragged", False)

    def _adopt(self, cache: DecoderCache) -> None:
        # The table first: where making it fails, the cache at hand keeps the table that goes with it.
        if isinstance(cache, StaticKVCache):
            self._rotary = rotary_table(self.model, cache.max_length)
        self.cache = cache
        if self._graphs is not None:
            self._graphs.clear()

    @one_at_a_time
    def reserve(self, batch: int, max_length: int) -> None:
        """Make room for `max_length` tokens of `batch` rows, keeping what is held if the batch is the same.

        A cache that is not static makes its own room, step by step. Errors: ValueError where the length passes the
        model's positions or the memory that is free.
        """
        most = self.model.config.max_position_embeddings
        _check.integer("batch", batch, 1)
        _check.integer("max_length", max_length, 1, most)
        rounded = min(-(-max_length // _GROWTH) * _GROWTH, most)
        if self.cache is not None and not isinstance(self.cache, StaticKVCache):
            if self._rotary is None or self._rotary[0].shape[0] < max_length:
                self._rotary = rotary_table(self.model, rounded)
            return
        if self.cache is not None and self.cache.batch == batch and self.cache.max_length >= max_length:
            return
        if self.cache is not None and self.cache.batch == batch:
            self._adopt(self.cache.grown(rounded))
        else:
            kind = StaticKVCache if self.cache is None else type(self.cache)
            self.cache = None
            self._adopt(kind(self.model.config, batch, rounded, dtype=self.dtype, device=self.device))

    @one_at_a_time
    def crop(self, length: Lengths) -> None:
        """Forget every token from `length` on; the next step continues from there.

        `length` is one number, which cuts the rows that are longer, or one a row. Errors: ValueError where rows would
        differ in length and the cache cannot hold that; a StaticKVCache can.
        """
        if isinstance(length, Integral):
            lengths = [_check.integer("length", length, 0, self.length)]
        else:
            lengths = check_lengths("length", length, self.lengths)
        check_ragged("length", lengths, self.cache)
        if self.cache is None:
            return
        if len(set(lengths)) > 1:
            self.cache.crop_rows_to(lengths)
        else:
            self.cache.crop_to(max(lengths, default=0))

    @one_at_a_time
    def keep(self, start: Lengths, paths: Sequence[Sequence[int]]) -> None:
        """After a tree: of row b's tokens from `start[b]` on hold those at `start[b] + i` for each i of `paths[b]`, one
        after another, and forget the others.

        `start` is one number or one a row; a path's indices ascend, as they do from a tree's root to a leaf. What is
        kept is as if the path alone had been fed. Errors: ValueError for a cache that cannot (blocks), and where rows
        would differ in length on a cache that cannot hold that.
        """
        cache, held = check_keeps_trees(self.cache), self.lengths
        starts = check_lengths("start", start, held)
        checked = check_paths(paths, starts, held)
        check_ragged("paths", [begin + len(path) for begin, path in zip(starts, checked, strict=True)], cache)
        cache.keep(starts, checked)

    @one_at_a_time
    def reset(self) -> None:
        """Forget all tokens."""
        self.crop(0)

    @one_at_a_time
    @torch.inference_mode()
    def fill_cache(self, batch: int, length: int, seed: int = 0) -> None:
        """Hold `length` random tokens' K and V for `batch` rows: to time a step at a context without a prefill."""
        self.reserve(batch, max(1, _check.integer("length", length, 0)))
        if isinstance(self.cache, StaticKVCache):
            self.cache.fill(length, seed)
            return
        self.cache.crop_to(0)
        if length:
            at = step_input(self._rotary, 0, length, None)
            write_random(self.cache, self.model.config, batch, at, dtype=self.dtype, seed=seed)

    def _check_tokens(self, name: str, tokens: torch.Tensor) -> torch.Tensor:
        return check_tokens(name, tokens, self.model.config.vocab_size, self.device)

    @one_at_a_time
    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        *,
        tree_mask: torch.Tensor | None = None,
        return_hidden: bool = False,
        logits_to_keep: int | None = None,
        mark: Callable[[str], None] = no_mark,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Append `tokens (batch, q_len)` to the cache and return their logits `(batch, q_len, vocab)`.

        `tree_mask (q_len, q_len)`, bool, makes the new tokens a tree: row i is True at i and at i's ancestors, which
        stand before it; every token sees all that its row held before. `return_hidden` adds the hidden states
        `(batch, q_len, hidden_size)` after the final norm. `logits_to_keep` leaves out all but the last logits.
        """
        tokens = self._check_tokens("tokens", tokens)
        batch, q_len = tokens.shape
        if self.length:
            takes = f"{self.cache.batch} rows, as the cache holds; or call reset() first"
            _check.require(batch == self.cache.batch, "tokens", f"{batch} rows", takes)
        if logits_to_keep is not None:
            _check.integer("logits_to_keep", logits_to_keep, 1, q_len)
        self.reserve(batch, self.length + q_len)
        graphed = self._graphs is not None and tree_mask is None and mark is no_mark and not self._ragged
        if graphed and self.length and q_len <= MAX_TOKENS:
            options = {"logits_to_keep": logits_to_keep, "return_hidden": return_hidden}
            logits, hidden = self._graphs.run(self._ops, tokens, self.cache, self._rotary, **options)
            self.cache.advance(q_len)
            return (logits, hidden) if return_hidden else logits
        past = self.length
        at = step_input(self._rotary, self.cache.lengths if self._ragged else past, q_len, tree_mask)
        self.cache.extend(tokens)
        try:
            logits, hidden = run_step(self._ops, tokens, at, self.cache, logits_to_keep=logits_to_keep, mark=mark)
        except BaseException:  # an interrupt too: some layers would hold a step that others do not
            self.cache.crop_to(past)
            raise
        self.cache.advance(q_len)
        return (logits, hidden) if return_hidden else logits

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
    ) -> GenerationResult:
        """Continue `input_ids (batch, prompt)`, rows of one length, by up to `max_new_tokens`; temperature 0 is greedy.

        Starts from an empty cache, or after as much of the prompt as a prefix cache holds. Stops when every row has
        made an `eos_token_id`; a row that stopped earlier is padded with it. `streamer` is fed as
        `transformers.generate` feeds it: the prompt, then each step's tokens.
        """
        check_sampling(temperature, top_k, top_p)
        check_streamer(streamer)
        input_ids = self._check_tokens("input_ids", input_ids)
        batch, prompt = input_ids.shape
        room = self.model.config.max_position_embeddings - prompt
        _check.integer("max_new_tokens", max_new_tokens, 1, max(1, room))
        stop = stop_ids(eos_token_id, self.model.config.vocab_size, self.device)
        generator = seeded_generator(self.device, seed)
        pick = functools.partial(sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        with self.turn:
            self.reset()
            self.reserve(batch, prompt + max_new_tokens)
            return continue_prompt(self, input_ids, max_new_tokens, pick=pick, stop=stop, streamer=streamer)
