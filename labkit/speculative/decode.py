"""`generate`: a proposer drafts, the target verifies the whole draft in one pass, and the output is the target's.

Speculative decoding (Leviathan, Kalman and Matias 2023, algorithm 1; Chen et al. 2023, algorithm 2): one verifying call
answers for every drafted token what the target would have said there, so that each call yields the tokens that agree
and one of the target's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from labkit import _check
from labkit.engine.arguments import check_keeps_trees, check_streamer, check_tokens
from labkit.engine.decode import Decoder
from labkit.engine.sampling import seeded_generator, stop_ids
from labkit.kv_cache.interface import DecoderCache, RaggedCache
from labkit.models import LoadedModel
from labkit.speculative.interface import Proposer, Sampling, check_proposer
from labkit.speculative.loop import SpeculativeLoop, SpeculativeOutput
from labkit.speculative.stats import Call


def generate(
    target: Decoder | LoadedModel | PreTrainedModel,
    input_ids: Tensor,
    proposer: Proposer,
    *,
    max_new_tokens: int,
    num_assistant_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    cache: DecoderCache | None = None,
    streamer: BaseStreamer | None = None,
    seed: int | None = None,
    watch: Callable[[Call], None] | None = None,
) -> SpeculativeOutput:
    """Continue `input_ids (batch, prompt)`, rows of one length, by up to `max_new_tokens`, as the target alone would.

    Greedy output (temperature 0) is the target's token by token, up to rounding: a pass over several tokens may round
    differently from a pass over one, which shows where two logits all but tie; over keys and values of 4 bits or fewer
    also where they are a little further apart, since codes fall on either side of a step. Sampled output has its
    distribution.
    num_assistant_tokens: the most tokens drafted a call (γ; of a tree, its depth); 0 drafts nothing. cache: as for
    `Decoder`; None where `target` is one. streamer: fed as `transformers` feeds it, for one row. watch(call): told
    after each verifying call, for each row still running.

    The prompt's pass and the first token are those of plain decoding; every later token comes from a verifying call.
    Errors: ValueError for arguments out of range; for a cache that cannot hold what comes: rows of different lengths
    (several rows), or a tree; and as the proposer's `begin` raises for what does not go together.
    """
    check_proposer(proposer)
    _check.integer("num_assistant_tokens", num_assistant_tokens, 0)
    decoder = _decoder(target, cache)
    input_ids = check_tokens("input_ids", input_ids, decoder.model.config.vocab_size, decoder.device)
    batch, prompt = input_ids.shape
    check_streamer(streamer, batch)
    room = decoder.model.config.max_position_embeddings - prompt
    _check.integer("max_new_tokens", max_new_tokens, 1, max(1, room))
    stop = stop_ids(eos_token_id, decoder.model.config.vocab_size, decoder.device)
    _check.require(watch is None or callable(watch), "watch", watch, "a function of a Call, or None")
    if max_new_tokens > 1:  # the first token is that of the prompt's pass: nothing is drafted for it
        _check_cache(decoder.cache, proposer, batch, drafts=num_assistant_tokens > 0, ends=stop is not None)
    loop = SpeculativeLoop(
        decoder,
        proposer,
        Sampling(temperature, top_k, top_p),
        seeded_generator(decoder.device, seed),
        num_assistant_tokens,
        prompt + max_new_tokens,
        frozenset(stop.tolist() if stop is not None else ()),
        streamer,
        watch,
    )
    return loop(input_ids)


def _check_cache(cache: DecoderCache | None, proposer: Proposer, batch: int, *, drafts: bool, ends: bool) -> None:
    """Before the first pass: which rows accept how much, or end, is known only on the way."""
    if cache is None:  # a static one will be made
        return
    even = batch == 1 or not (drafts or ends)
    takes = "a StaticKVCache, or one row: rows accept different numbers of tokens"
    _check.require(even or isinstance(cache, RaggedCache), "cache", f"a {type(cache).__name__} for {batch} rows", takes)
    if drafts and getattr(proposer, "tree", None) is not None:
        check_keeps_trees(cache)


def _decoder(target: object, cache: DecoderCache | None) -> Decoder:
    if not isinstance(target, Decoder):
        return Decoder(target, cache=cache)
    _check.require(cache is None, "cache", type(cache).__name__, "None where target is a Decoder, which has its own")
    return target
