"""The loop of `Decoder.generate`: the prompt, then one token a step, with the time of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.generation.streamers import BaseStreamer

from labkit.measure import synchronize, track_peak

if TYPE_CHECKING:
    from labkit.engine.decode import Decoder


@dataclass(frozen=True)
class GenerationResult:
    """`sequences (batch, prompt + new)`; seconds to the first token, and per token after it; new tokens of all rows
    over the whole time; the most memory in use while it ran (the allocator's on a GPU, the process's resident set on a
    CPU, None where the system does not tell). On a GPU the first step in each 256 slots of a cache captures a graph,
    and that counts: to time it, generate once before."""

    sequences: torch.Tensor
    ttft_s: float
    tpot_s: float
    tokens_per_second: float
    peak_bytes: int | None


def continue_prompt(
    decoder: Decoder,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    *,
    pick: Callable[[torch.Tensor], torch.Tensor],
    stop: torch.Tensor | None,
    streamer: BaseStreamer | None,
) -> GenerationResult:
    """Up to `max_new_tokens` after `input_ids (batch, prompt)`, for which the decoder has room; `pick` makes
    `(batch,)` tokens of `logits (batch, vocab)`, and a row ends with one of the `stop` ids."""
    batch = input_ids.shape[0]
    if streamer is not None:
        decoder.turn.tell(streamer.put, input_ids.cpu())
    steps, times = [input_ids], []
    finished = torch.zeros(batch, dtype=torch.bool, device=decoder.device)
    with track_peak(decoder.device) as peak:
        synchronize(decoder.device)
        begin = time.perf_counter()
        tokens = input_ids[:, decoder.cache.begin(input_ids) :]
        for _ in range(max_new_tokens):
            token = pick(decoder.forward(tokens, logits_to_keep=1)[:, -1])
            if stop is not None:
                token = torch.where(finished, stop[0], token)
                finished = torch.isin(token, stop)
            steps.append(tokens := token[:, None])
            synchronize(decoder.device)
            times.append(time.perf_counter() - begin)
            if streamer is not None:
                decoder.turn.tell(streamer.put, token.cpu())
            if stop is not None and bool(finished.all()):
                break
    if streamer is not None:
        streamer.end()
    ttft, total, new = times[0], times[-1], len(times)
    tpot = (total - ttft) / (new - 1) if new > 1 else float("nan")
    return GenerationResult(torch.cat(steps, dim=1), ttft, tpot, batch * new / total, peak.bytes)
