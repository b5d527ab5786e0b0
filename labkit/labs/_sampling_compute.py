"""What `sampling_lab` measures: the next token's distribution, three texts as they are drawn, what is accepted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from labkit.labs._result import Progress
from labkit.labs._sampling_result import DRAFTED, TEXTS, SampledText, SamplingParams, SamplingResult
from labkit.labs._sampling_steps import Draw, Seen, next_token, prompt_logits
from labkit.labs._speculative_compute import decode_token
from labkit.labs._speculative_models import Targets
from labkit.labs._speculative_result import SpeculativeParams
from labkit.labs._speculative_steps import fastest_threads, streamed
from labkit.speculative.interface import Proposer
from labkit.speculative.prompts import prompt_ids
from labkit.speculative.stats import SpeculativeStats

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | SamplingResult]


class SamplingCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and SamplingResult, each fuller than the one
    before: first the distribution of the next token, then the texts as they come, one after the other.

    `prompts`: the texts that `params.prompt` counts. `make`: what drafts at a setting.
    """

    def __init__(
        self,
        targets: Targets,
        prompts: Sequence[str],
        *,
        make: Callable[[SamplingParams], Proposer] | None = None,
    ) -> None:
        self._targets, self._prompts, self._make = targets, prompts, make or self._proposer
        self._logits: dict[tuple[str, int], Tensor] = {}
        self._threads: dict[str, int] = {}

    def __call__(self, params: SamplingParams, cancelled: Cancelled) -> Steps:
        before = torch.get_num_threads()
        try:
            yield from self._stages(params, cancelled)
        finally:
            torch.set_num_threads(before)

    def _stages(self, params: SamplingParams, cancelled: Cancelled) -> Steps:
        if not self._targets.has(params.weights):
            yield Progress(f"Loading {params.model}, {params.weights} weights (once)", 0.02)
        input_ids = self._input_ids(params)
        yield Progress("The next token's distribution", 0.08)
        if cancelled():
            return
        found = self._distribution(params, input_ids)
        yield found
        if cancelled():
            return
        yield Progress(f"{params.proposer} gets ready", 0.12)
        proposer = self._make(params)
        if cancelled():
            return
        found = replace(found, threads=self._set_threads(params.weights, cancelled))
        if cancelled():
            return
        eos = getattr(self._targets.loaded.tokenizer, "eos_token_id", None)
        draw = Draw(self._targets.decoder(params.weights), input_ids, proposer, params, eos)
        yield from self._texts(draw, found, cancelled)

    def _proposer(self, params: SamplingParams) -> Proposer:
        """As the lab of speculation makes it; a proposer is the same at every temperature."""
        at = {"proposer": params.proposer, "weights": params.weights, "model": params.model}
        return self._targets.proposer(SpeculativeParams(DRAFTED, 0.0, **at))

    def _input_ids(self, params: SamplingParams) -> Tensor:
        device = self._targets.decoder(params.weights).device
        return prompt_ids(self._targets.loaded.tokenizer, self._prompts[params.prompt]).to(device)

    def _distribution(self, params: SamplingParams, input_ids: Tensor) -> SamplingResult:
        """The prompt is read once; a moved slider makes another distribution of the same logits."""
        decoder, key = self._targets.decoder(params.weights), (params.weights, params.prompt)
        if key not in self._logits:
            self._logits[key] = prompt_logits(decoder, input_ids)
        said = next_token(self._logits[key], params.sampling, functools.partial(decode_token, self._targets.loaded))
        dtype = str(decoder.dtype).removeprefix("torch.")
        prompt = self._prompts[params.prompt]
        return SamplingResult(params, str(decoder.device), dtype, prompt, input_ids.shape[1], said)

    def _set_threads(self, weights: str, cancelled: Cancelled) -> int | None:
        """The fastest number of CPU threads, found once for these weights; None on a GPU."""
        decoder, most = self._targets.decoder(weights), torch.get_num_threads()
        if decoder.device.type != "cpu":
            return None
        if weights not in self._threads:
            count = fastest_threads(decoder, tuple(sorted({1, most})), cancelled)
            if cancelled():
                return most
            self._threads[weights] = count
        torch.set_num_threads(self._threads[weights])
        return self._threads[weights]

    def _texts(self, draw: Draw, found: SamplingResult, cancelled: Cancelled) -> Steps:
        """Each from a seed of its own."""
        for i in range(TEXTS):
            seed, done = draw.params.seed + i, found.texts
            yield Progress(f"Text {i + 1} of {TEXTS}, seed {seed}, as it comes", 0.2 + 0.8 * i / TEXTS)
            text = SampledText(seed)
            with contextlib.closing(streamed(draw, seed, cancelled)) as stream:
                for step in stream:
                    text = self._grown(text, step)
                    found = replace(found, texts=(*done, text))
                    yield found
            if cancelled():
                return

    def _grown(self, text: SampledText, step: list[Seen] | SpeculativeStats) -> SampledText:
        """With what came since, or with what was counted in the end."""
        if isinstance(step, SpeculativeStats):
            return replace(text, stats=step)
        tokens = tuple(token for seen in step for token in seen.emitted)
        return replace(
            text,
            tokens=text.tokens + tokens,
            pieces=text.pieces + tuple(decode_token(self._targets.loaded, token) for token in tokens),
            likeliest=text.likeliest + tuple(one for seen in step for one in seen.likeliest),
            chances=text.chances + tuple(chance for seen in step for chance in seen.chances),
        )
