"""`model.generate(custom_generate=custom_generate, draft_model=...)`: `transformers` prepares, this package decodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from labkit import _check
from labkit.kv_cache.interface import DecoderCache
from labkit.models import LoadedModel
from labkit.speculative.decode import generate
from labkit.speculative.draft_model import DraftModel
from labkit.speculative.interface import Proposer, Sampling

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.streamers import BaseStreamer

# In the order that `labkit.engine.sampling` applies them.
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
_KEPT_BY_NOBODY = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
# What `transformers` itself takes where nothing is set.
_NUM_ASSISTANT_TOKENS = 20


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    logits_processor: Sequence[object] = (),
    stopping_criteria: Sequence[object] = (),
    generation_config: GenerationConfig,
    draft_model: DraftModel | LoadedModel | PreTrainedModel | None = None,
    proposer: Proposer | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: object,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decode speculatively inside `model.generate`; greedy output is that of `model.generate` alone, token by token.

    Give `generate` either `draft_model`, or `proposer=PromptLookup()` or any other (`assistant_model` is not passed
    on). Honoured: max_new_tokens, max_length, do_sample, temperature, top_k, top_p, eos_token_id, pad_token_id,
    num_assistant_tokens (20 where it is not set, as in `transformers`), num_return_sequences,
    return_dict_in_generate, and `past_key_values` that a Decoder can read. `transformers` keeps `streamer` from a
    function: pass `token_streamer`, for one row. Sampling draws its seed from torch's global generator, so that
    `torch.manual_seed` repeats it.

    Returns `(batch, prompt + new)`, or with return_dict_in_generate a GenerateDecoderOnlyOutput that holds only that.
    Errors: ValueError for what is not computed here: other logits processors, other criteria to stop, beams, padded
    batches, outputs other than tokens, caches that hold tokens already.
    """
    _check_asked(generation_config, model_kwargs)
    sampling = _sampling(logits_processor, bool(generation_config.do_sample))
    max_length, stop = _ends(stopping_criteria, input_ids.shape[1])
    gamma = generation_config.num_assistant_tokens
    out = generate(
        model,
        input_ids,
        _proposer(draft_model, proposer),
        max_new_tokens=max_length - input_ids.shape[1],
        num_assistant_tokens=_NUM_ASSISTANT_TOKENS if gamma is None else gamma,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        eos_token_id=stop or None,
        cache=_cache(model_kwargs.get("past_key_values")),
        streamer=token_streamer,
        seed=None if sampling.greedy else int(torch.randint(2**62, ())),
    )
    sequences = out.sequences.to(input_ids.device)
    if generation_config.pad_token_id is not None and stop:
        sequences = _padded(sequences, input_ids.shape[1], stop, generation_config.pad_token_id)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _check_asked(config: GenerationConfig, model_kwargs: dict[str, object]) -> None:
    mode = config.get_generation_mode()
    one_path = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    _check.require(one_path, "generation_config", f"the mode {mode.value!r}", "greedy_search or sample: one path a row")
    kept = [name for name in _KEPT_BY_NOBODY if getattr(config, name, False)]
    _check.require(not kept, "generation_config", f"{', '.join(kept)}=True", "none: verifying keeps tokens only")
    mask = model_kwargs.get("attention_mask")
    padded = mask is not None and not bool((mask == 1).all())
    _check.require(not padded, "attention_mask", "a batch with padding", "prompts of one length, all ones")
    places = model_kwargs.get("position_ids")
    counted = places is None or bool((places == torch.arange(places.shape[-1], device=places.device)).all())
    _check.require(counted, "position_ids", "others", "None, or 0, 1, 2 and on: places are counted from the start")
    embeds = model_kwargs.get("inputs_embeds") is not None
    _check.require(not embeds, "inputs_embeds", "embeddings", "None: give input_ids")


def _proposer(draft_model: object, proposer: Proposer | None) -> Proposer:
    one = (draft_model is None) != (proposer is None)
    takes = "one of them: draft_model= a smaller model, or proposer= any other way to draft"
    _check.require(one, "draft_model, proposer", "neither" if proposer is None else "both", takes)
    if proposer is not None:
        return proposer
    return draft_model if isinstance(draft_model, DraftModel) else DraftModel(draft_model)


def _sampling(processors: Sequence[object], do_sample: bool) -> Sampling:
    """From the warpers that `transformers` made out of its config, or that a caller gave."""
    places = []
    for processor in processors:
        kind = type(processor)
        takes = "temperature, top_k and top_p alone: leave it out, or generate without custom_generate"
        _check.require(kind in _WARPERS, "logits_processor", kind.__name__, takes)
        places.append(_WARPERS.index(kind))
    in_order = places == sorted(set(places))
    names = ", ".join(type(processor).__name__ for processor in processors)
    _check.require(in_order, "logits_processor", names, "temperature, then top_k, then top_p, each once")
    if not do_sample:  # none of them changes which logit is the largest
        return Sampling()
    found = dict(zip(places, processors, strict=True))
    _check_warpers(processors)
    temperature = found[0].temperature if 0 in found else 1.0
    return Sampling(temperature, found[1].top_k if 1 in found else 0, found[2].top_p if 2 in found else 1.0)


def _check_warpers(processors: Sequence[object]) -> None:
    """What a caller's own warper does beside its one number is not done here."""
    for processor in processors:
        least, filled = getattr(processor, "min_tokens_to_keep", 1), getattr(processor, "filter_value", -math.inf)
        plain = least == 1 and filled == -math.inf
        got = f"{type(processor).__name__} with min_tokens_to_keep={least}, filter_value={filled:g}"
        _check.require(plain, "logits_processor", got, "min_tokens_to_keep=1 and filter_value=-inf")


def _ends(criteria: Sequence[object], prompt: int) -> tuple[int, list[int]]:
    """The length that ends a row, and the ids that do."""
    lengths, stop = [], []
    for criterion in criteria:
        if isinstance(criterion, MaxLengthCriteria):
            lengths.append(criterion.max_length)
        elif isinstance(criterion, EosTokenCriteria):
            stop += criterion.eos_token_id.flatten().tolist()
        else:
            takes = "a length and end-of-text ids: leave it out, or generate without custom_generate"
            _check.require(False, "stopping_criteria", type(criterion).__name__, takes)
    _check.require(bool(lengths), "stopping_criteria", "no length", "max_new_tokens or max_length")
    _check.integer("max_length", min(lengths), prompt + 1)
    return min(lengths), stop


def _cache(given: object) -> DecoderCache | None:
    """A cache that a Decoder reads, if the caller gave one; `transformers` makes an empty one of its own for nobody."""
    if isinstance(given, DecoderCache):
        takes = "an empty one: the prompt is read from its start"
        _check.require(given.length == 0, "past_key_values", f"a cache of {given.length} tokens", takes)
        return given
    empty = given is None or (type(given) is DynamicCache and given.get_seq_length() == 0)
    takes = "none, or one that a Decoder can read, such as labkit.kv_cache.QuantizedCache"
    _check.require(empty, "past_key_values", f"a {type(given).__name__}", takes)
    return None


def _padded(sequences: torch.Tensor, prompt: int, stop: list[int], pad: int) -> torch.Tensor:
    """`pad` after the id that ended each row, as `transformers` fills a batch up."""
    ended = torch.isin(sequences[:, prompt:], torch.tensor(stop, device=sequences.device))
    after = ended.cumsum(1) - ended.long() > 0
    return torch.cat((sequences[:, :prompt], sequences[:, prompt:].masked_fill(after, pad)), dim=1)
