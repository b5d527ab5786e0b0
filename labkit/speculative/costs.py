"""What the time model needs, measured: the cost of drafting and of verifying, over that of a plain decode step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from labkit import _check
from labkit.engine.decode import Decoder
from labkit.engine.sampling import sample, seeded_generator
from labkit.measure import Measurement, Timing, device_lock, synchronize
from labkit.speculative.interface import Proposal, Proposer, Sampling, check_proposer
from labkit.speculative.loop import SpeculativeLoop
from labkit.speculative.theory import expected_speedup

_GREEDY = Sampling()
_MIN_CALLS = 5
# Calls in a row before the prompt is read again, if all are accepted whole: so far may a run leave the length it is at.
_CALLS_A_RUN = 8
_PARTS = {"step_s": "plain_step", "verify_s": "verify", "draft_s": "draft", "rest_s": "loop_rest"}


@dataclass(frozen=True)
class SpeculationCosts:
    """Medians, in seconds, at one length and one γ, of calls that drafted γ tokens.

    step_s: a plain decode step as `Decoder.generate` takes it: one token fed, the next one chosen. draft_s: the
    proposal of a call, whole, with what the proposer does to catch up on the tokens verified before. verify_s: the
    target's pass over the last token and the γ drafted ones (of a tree: over all its nodes). rest_s: all else that a
    call does: tokens put together, the verdict, the rows, the crop, `observe`. A call takes the sum of the last three.
    """

    gamma: int
    step_s: float
    verify_s: float
    draft_s: float
    rest_s: float
    timings: Mapping[str, Timing] = field(default_factory=lambda: MappingProxyType({}))
    details: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        _check.integer("gamma", self.gamma, 1)
        for name in _PARTS:
            _check.number(name, getattr(self, name), 0.0)
        _check.require(self.step_s > 0, "step_s", self.step_s, "a time above 0")

    @property
    def draft_cost(self) -> float:
        """c: drafting one token, in plain steps."""
        return self.draft_s / self.gamma / self.step_s

    @property
    def verify_cost(self) -> float:
        """v: all of a call but the drafting, in plain steps: the pass over γ + 1 tokens and the loop's own work, since
        a plain step holds its loop's work too. γ c + v is then a whole call; without the loop's part, the model would
        promise more than any run can keep. The pass alone is `verify_s / step_s`."""
        return (self.verify_s + self.rest_s) / self.step_s

    def speedup(self, alpha: float) -> float:
        """MODELLED: E / (γ c + v) at the acceptance `alpha` of a chain."""
        return expected_speedup(alpha, self.gamma, self.draft_cost, self.verify_cost)

    def speedup_at(self, tokens_per_target_call: float) -> float:
        """MODELLED: the same for an E that is known otherwise: counted in a run, or a tree's."""
        tokens = _check.number("tokens_per_target_call", tokens_per_target_call, 0.0)
        return tokens / (self.gamma * self.draft_cost + self.verify_cost)

    def measurements(self) -> list[Measurement]:
        """The four times with their spread, and the two ratios, for the ledger."""
        details = dict(self.details)
        details["params"] = {"num_assistant_tokens": self.gamma, **details.get("params", {})}
        lines = [
            Measurement.of(f"speculation_{name}", getattr(self, part), "s", spread=self.timings.get(part), **details)
            for part, name in _PARTS.items()
        ]
        ratios = {"draft_cost": self.draft_cost, "verify_cost": self.verify_cost}
        return lines + [Measurement.of(f"speculation_{n}", value, "ratio", **details) for n, value in ratios.items()]


@dataclass
class _TimedLoop(SpeculativeLoop):
    """The loop of `generate` itself, with clocks around its draft and its verifying pass. Every draft is γ long: what
    a proposer leaves out is filled with token 0, so that a lookup which finds nothing is still costed at this γ."""

    draft_s: float = 0.0
    verify_s: float = 0.0

    def draft(self) -> Proposal:
        begin = time.perf_counter()
        proposal = super().draft()
        synchronize(self.decoder.device)
        self.draft_s = time.perf_counter() - begin
        return proposal if proposal.tree is not None else _filled(proposal, self.gamma)

    def forward(self, tokens: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        synchronize(self.decoder.device)
        begin = time.perf_counter()
        found = super().forward(tokens, **options)
        synchronize(self.decoder.device)
        self.verify_s = time.perf_counter() - begin
        return found

    def timed_call(self) -> dict[str, float]:
        """Seconds of each part of one call."""
        synchronize(self.decoder.device)
        begin = time.perf_counter()
        self.call()
        synchronize(self.decoder.device)
        rest = time.perf_counter() - begin - self.draft_s - self.verify_s
        return {"draft_s": self.draft_s, "verify_s": self.verify_s, "rest_s": max(0.0, rest)}

    def timed_step(self) -> float:
        """Seconds of a plain step from the same place; the cache is left as it was."""
        lengths, last = self.decoder.lengths, [[row[-1]] for row in self.rows]
        tokens, s = torch.tensor(last, device=self.decoder.device), self.sampling
        synchronize(self.decoder.device)
        begin = time.perf_counter()
        logits = self.decoder.forward(tokens, logits_to_keep=1)[:, -1]
        sample(logits, s.temperature, s.top_k, s.top_p, self.generator)
        synchronize(self.decoder.device)
        seconds = time.perf_counter() - begin
        self.decoder.crop(lengths)
        return seconds

    @property
    def has_room(self) -> bool:
        """For one more call with a whole draft."""
        return bool(self.rows) and max(map(len, self.rows)) + self.gamma + 1 <= self.limit


def _filled(proposal: Proposal, gamma: int) -> Proposal:
    missing = gamma - proposal.tokens.shape[1]
    if missing <= 0:
        return proposal
    tokens = torch.nn.functional.pad(proposal.tokens, (0, missing))
    if proposal.probs is None:
        return Proposal(tokens)
    batch, _, vocab = proposal.probs.shape
    certain = proposal.probs.new_zeros(batch, missing, vocab)
    certain[..., 0] = 1
    return Proposal(tokens, torch.cat((proposal.probs, certain), 1))


@torch.inference_mode()
def measure_costs(
    target: Decoder,
    proposer: Proposer,
    input_ids: torch.Tensor,
    gamma: int,
    sampling: Sampling = _GREEDY,
    min_run_s: float = 0.2,
) -> SpeculationCosts:
    """Costs of speculation with `gamma` drafted tokens a call (a tree: its depth) after `input_ids (batch, prompt)`.

    Calls of the real loop and plain steps from the same place alternate in one run, until the calls have taken
    `min_run_s` seconds and at least 5 are in; one of each goes before as a warm-up. The rows grow by what the calls
    emit, by at most 8 (γ + 1) tokens, before the prompt is read anew. Leaves the target empty. Errors: ValueError for
    arguments, for a prompt that leaves no room, and as the proposer's `begin` raises.
    """
    _check.require(isinstance(target, Decoder), "target", type(target).__name__, "a Decoder")
    check_proposer(proposer)
    _check.require(isinstance(sampling, Sampling), "sampling", sampling, "a Sampling")
    _check.integer("gamma", gamma, 1)
    _check.number("min_run_s", min_run_s, 0.0)
    _check.tensor("input_ids", input_ids, ndim=2, dtypes=(torch.int64, torch.int32))
    input_ids = input_ids.to(target.device, torch.int64)
    prompt, most = input_ids.shape[1], target.model.config.max_position_embeddings
    _check.require(0 < prompt < most - gamma, "input_ids", f"{prompt} tokens", f"1 to {most - gamma - 1} for γ {gamma}")
    limit = min(prompt + _CALLS_A_RUN * (gamma + 1), most)
    samples: dict[str, list[float]] = {name: [] for name in _PARTS}
    with device_lock(target.device):
        loop = _TimedLoop(
            decoder=target,
            proposer=proposer,
            sampling=sampling,
            generator=seeded_generator(target.device, 0),
            gamma=gamma,
            limit=limit,
            stop=frozenset(),
            streamer=None,
            watch=lambda call: None,
        )
        _collect(loop, input_ids, samples, min_run_s)
        target.reset()
    timings = {name: Timing.of(seconds) for name, seconds in samples.items()}
    details = {
        "params": {"batch": len(input_ids), "context_length": prompt, "proposer": type(proposer).__name__},
        "dtype": target.dtype,
        "device": target.device,
        "threads": torch.get_num_threads(),
    }
    medians = {name: timing.median for name, timing in timings.items()}
    return SpeculationCosts(gamma, **medians, timings=timings, details=details)


def _collect(loop: _TimedLoop, input_ids: torch.Tensor, samples: dict[str, list[float]], min_run_s: float) -> None:
    """Add to `samples` the seconds of plain steps and calls in turn, the first of each left out."""
    spent, warm = 0.0, False
    while spent < min_run_s or len(samples["step_s"]) < _MIN_CALLS:
        if not loop.has_room:
            loop.read_prompt(input_ids)
        step, call = loop.timed_step(), loop.timed_call()
        if warm:
            samples["step_s"].append(step)
            for name, seconds in call.items():
                samples[name].append(seconds)
            spent += sum(call.values())
        warm = True
