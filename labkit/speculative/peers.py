"""`transformers`' own assisted generation and prompt lookup beside this package's: one target, one γ, one table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from labkit import _check
from labkit.engine.decode import Decoder
from labkit.measure import synchronize
from labkit.models import LoadedModel, plain_model
from labkit.speculative.compare import Comparison, Run, compare_methods
from labkit.speculative.decode import generate
from labkit.speculative.interface import Proposer
from labkit.speculative.stats import SpeculativeStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Method = Callable[[torch.Tensor], Run]


def peer_methods(
    target: LoadedModel | PreTrainedModel,
    proposers: Mapping[str, Proposer],
    *,
    max_new_tokens: int,
    num_assistant_tokens: int,
    draft: LoadedModel | PreTrainedModel | None = None,
    max_matching_ngram_size: int = 3,
    eos_token_id: int | Sequence[int] | None = None,
) -> dict[str, Method]:
    """Greedy generation after a prompt `(1, n)`, each way: this package's Decoder alone, its loop with each of
    `proposers`, `transformers.generate` alone, with prompt lookup, and with `draft` as its assistant.

    All run the same modules, quantized ones too. `transformers` is told what makes it comparable: γ constant and no
    threshold of confidence, both on the assistant, which is where it reads them. Its calls of the target are counted
    by a hook. Errors: ValueError for a draft that is the target's own object, whose calls could not be told apart.
    """
    _check.integer("max_new_tokens", max_new_tokens, 1)
    _check.integer("num_assistant_tokens", num_assistant_tokens, 1)
    _check.integer("max_matching_ngram_size", max_matching_ngram_size, 1)
    model = plain_model(target)
    assistant = None if draft is None else plain_model(draft)
    _check.require(assistant is not model, "draft", "the target itself", "another one, such as shared_copy(target)")
    decoder = Decoder(model)
    ends = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
    methods = {"labkit, alone": lambda ids: _timed(decoder, lambda: (decoder.generate(ids, **ends).sequences, None))}
    for name, proposer in proposers.items():
        methods[f"labkit, {name}"] = _ours(decoder, proposer, num_assistant_tokens, ends)
    theirs: dict[str, dict[str, object]] = {
        "alone": {},
        "prompt lookup": {
            "prompt_lookup_num_tokens": num_assistant_tokens,
            "max_matching_ngram_size": max_matching_ngram_size,
        },
    }
    if assistant is not None:
        theirs["assistant"] = {"assistant_model": assistant}
    for name, options in theirs.items():
        methods[f"transformers, {name}"] = _theirs(decoder, num_assistant_tokens, ends | options)
    return methods


def compare_peers(
    target: LoadedModel | PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    proposers: Mapping[str, Proposer],
    *,
    repeats: int = 3,
    **options: object,
) -> Comparison:
    """`peer_methods` (whose options it takes) over `prompts`, in turns; speed-ups are over this package's Decoder."""
    return compare_methods(peer_methods(target, proposers, **options), prompts, repeats, target=target)


def _timed(decoder: Decoder, run: Callable[[], tuple[torch.Tensor, object]]) -> Run:
    synchronize(decoder.device)
    begin = time.perf_counter()
    tokens, stats = run()
    synchronize(decoder.device)
    return Run(tokens, time.perf_counter() - begin, stats)


def _ours(decoder: Decoder, proposer: Proposer, gamma: int, ends: Mapping[str, object]) -> Method:
    def method(ids: torch.Tensor) -> Run:
        def run() -> tuple[torch.Tensor, SpeculativeStats]:
            out = generate(decoder, ids, proposer, num_assistant_tokens=gamma, **ends)
            return out.sequences, out.stats

        return _timed(decoder, run)

    return method


def _theirs(decoder: Decoder, gamma: int, options: Mapping[str, object]) -> Method:
    model = decoder.model
    # A chat model's own settings, such as a penalty for repeating, would make another output.
    plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "pad_token_id": 0, "use_cache": True}

    def method(ids: torch.Tensor) -> Run:
        ids = ids.to(decoder.device)
        given = plain | dict(options) | {"attention_mask": torch.ones_like(ids)}
        with _counting(model) as calls, _comparable(options.get("assistant_model"), gamma):
            run = _timed(decoder, lambda: (model.generate(ids, **given), None))
        new = run.tokens.shape[1] - ids.shape[1]
        stats = SpeculativeStats(n_target_calls=len(calls), n_row_calls=len(calls), n_emitted=new)
        return Run(run.tokens, run.seconds, stats)

    return method


@contextlib.contextmanager
def _counting(model: PreTrainedModel) -> Iterator[list[None]]:
    """A list that grows by one with each call of the model."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda module, args: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()


@contextlib.contextmanager
def _comparable(assistant: PreTrainedModel | None, gamma: int) -> Iterator[None]:
    """Exactly γ tokens a call: what `transformers` reads from the assistant's own config, put back afterwards."""
    if assistant is None:
        yield
        return
    config = assistant.generation_config
    wanted = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    before = {name: getattr(config, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
