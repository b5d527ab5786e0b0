"""What a call's parts cost: each second lands where it belongs, and the loop that is timed is the real one."""

import time
from types import SimpleNamespace

import pytest
import torch

from labkit.engine import Decoder
from labkit.ledger import Ledger
from labkit.models import tiny_model
from labkit.speculative import costs as costs_module
from labkit.speculative.costs import SpeculationCosts, measure_costs
from labkit.speculative.interface import Proposal, Sampling
from labkit.speculative.theory import expected_speedup
from labkit.speculative.tree import DraftTree

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
STEP, PASS_PER_TOKEN, DRAFT, OBSERVE = 1.0, 0.5, 3.0, 0.25


class Clock:
    """Moves when a part says that it took so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(costs_module, "time", SimpleNamespace(perf_counter=lambda: self.now))


class Slow(Decoder):
    """A real decoder that takes the clock's time, and notes how many tokens it is fed after how many."""

    clock: Clock | None = None

    def forward(self, tokens: torch.Tensor, **options: object):
        if not hasattr(self, "fed"):
            self.fed = []
        self.fed.append((self.length, tokens.shape[1]))
        if self.clock:
            self.clock.now += STEP if tokens.shape[1] == 1 else PASS_PER_TOKEN * tokens.shape[1]
        return super().forward(tokens, **options)


class Guess:
    """Drafts what it is told to, however many were asked for."""

    def __init__(self, length: int, clock: Clock | None = None, tree: DraftTree | None = None, sampled: bool = False):
        self.length, self.clock, self.tree, self.sampled = length, clock, tree, sampled
        self.wants_hidden, self.asked, self.begun = clock is not None, [], 0

    def begin(self, target: Decoder, input_ids: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> None:
        self.begun += 1

    def propose(self, rows: list[list[int]], n: int) -> Proposal:
        self.asked.append(n)
        if self.clock:
            self.clock.now += DRAFT
        tokens = torch.full((len(rows), self.length), 3)
        q = torch.full((len(rows), self.length, 256), 1 / 256) if self.sampled else None
        return Proposal(tokens, q, self.tree)

    def observe(self, hidden: torch.Tensor, kept: list[int]) -> None:
        self.clock.now += OBSERVE


def decoder(clock: Clock | None = None) -> Slow:
    made = Slow(tiny_model(vocab_size=256))
    made.clock = clock
    return made


@pytest.mark.parametrize("gamma", [1, 4])
def test_each_second_lands_where_it_belongs(monkeypatch, gamma: int) -> None:
    clock = Clock(monkeypatch)
    costs = measure_costs(decoder(clock), Guess(gamma, clock), PROMPT, gamma, min_run_s=0.0)
    verify = PASS_PER_TOKEN * (gamma + 1) if gamma else STEP
    assert (costs.step_s, costs.draft_s, costs.verify_s, costs.rest_s) == (STEP, DRAFT, verify, OBSERVE)
    assert costs.draft_cost == DRAFT / gamma / STEP and costs.verify_cost == (verify + OBSERVE) / STEP
    call = gamma * costs.draft_cost + costs.verify_cost
    assert call * STEP == DRAFT + verify + OBSERVE


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("length", "sampled"), [(0, False), (2, False), (4, False), (4, True), (2, True)])
def test_every_pass_is_over_the_last_token_and_a_whole_draft(batch: int, length: int, sampled: bool) -> None:
    """Whatever the proposer finds; and steps and calls take turns, from the same place."""
    target, proposer = decoder(), Guess(length, sampled=sampled)
    sampling = Sampling(1.0) if sampled else Sampling()
    measure_costs(target, proposer, PROMPT.expand(batch, -1), 4, sampling, min_run_s=0.0)
    turns = [(before, fed) for before, fed in target.fed if before]
    assert [fed for _, fed in turns] == [1, 5] * (len(turns) // 2) and len(turns) >= 12
    assert all(step[0] == call[0] for step, call in zip(turns[::2], turns[1::2], strict=True))
    assert set(proposer.asked) == {4}
    assert target.length == 0


def test_a_tree_is_fed_whole() -> None:
    target, tree = decoder(), DraftTree((0, 0, 1, 1))
    measure_costs(target, Guess(4, tree=tree), PROMPT, 2, min_run_s=0.0)
    assert {fed for before, fed in target.fed if before} == {1, 5}


def test_the_prompt_is_read_again_before_rows_grow_far(monkeypatch) -> None:
    """And a run lasts as long as it was asked to."""
    clock = Clock(monkeypatch)
    target, proposer = decoder(clock), Guess(1, clock)
    costs = measure_costs(target, proposer, PROMPT, 1, min_run_s=60 * (DRAFT + 1 + OBSERVE))
    assert costs.timings["draft_s"].n == costs.timings["step_s"].n == 60
    assert proposer.begun > 1 and max(before for before, _ in target.fed) <= 5 + 8 * 2


def test_a_prompt_of_one_token_and_one_that_just_fits() -> None:
    target = Slow(tiny_model(vocab_size=256, max_position_embeddings=16))
    for length in (1, 11):
        assert measure_costs(target, Guess(4), PROMPT[:, :1].expand(1, length), 4, min_run_s=0.0).step_s > 0
    with pytest.raises(ValueError, match=r"input_ids: got '12 tokens'; takes 1 to 11 for γ 4"):
        measure_costs(target, Guess(4), PROMPT[:, :1].expand(1, 12), 4, min_run_s=0.0)


def test_the_target_decodes_afterwards_as_before() -> None:
    target = decoder()
    before = target.generate(PROMPT, max_new_tokens=8).sequences
    measure_costs(target, Guess(3), PROMPT, 3, min_run_s=0.0)
    assert torch.equal(target.generate(PROMPT, max_new_tokens=8).sequences, before)


def test_by_the_real_clock_the_parts_fit_into_the_time_it_took() -> None:
    begin = time.perf_counter()
    costs = measure_costs(decoder(), Guess(3), PROMPT, 3, min_run_s=0.05)
    elapsed = time.perf_counter() - begin
    assert min(costs.step_s, costs.verify_s, costs.draft_s, costs.rest_s) > 0
    assert sum(timing.p10 * timing.n for timing in costs.timings.values()) < elapsed and elapsed > 0.05
    assert {timing.n for timing in costs.timings.values()} == {costs.timings["step_s"].n}


def test_the_model_by_hand() -> None:
    """γ = 4, c = 0.1, v = 1.2: a call takes 1.6 steps."""
    costs = SpeculationCosts(4, step_s=2.0, verify_s=2.2, draft_s=0.8, rest_s=0.2)
    assert costs.draft_cost == pytest.approx(0.1) and costs.verify_cost == pytest.approx(1.2)
    assert costs.speedup(0.8) == pytest.approx(3.3616 / 1.6) == pytest.approx(expected_speedup(0.8, 4, 0.1, 1.2))
    assert costs.speedup_at(2.4) == pytest.approx(1.5)


def test_the_ledger_takes_the_measurements(tmp_path) -> None:
    costs = measure_costs(decoder(), Guess(2), PROMPT, 2, min_run_s=0.0)
    lines = {line.name: line for line in costs.measurements()}
    assert {name: line.unit for name, line in lines.items()} == {
        "speculation_plain_step": "s",
        "speculation_verify": "s",
        "speculation_draft": "s",
        "speculation_loop_rest": "s",
        "speculation_draft_cost": "ratio",
        "speculation_verify_cost": "ratio",
    }
    verify = lines["speculation_verify"]
    assert verify.value == costs.verify_s and verify.p10 <= verify.value <= verify.p90
    assert verify.params == {"num_assistant_tokens": 2, "batch": 1, "context_length": 5, "proposer": "Guess"}
    assert verify.dtype == "float32" and verify.threads == torch.get_num_threads() and verify.device
    ledger = Ledger(tmp_path / "l.jsonl")
    for line in lines.values():
        ledger.append(line)
    assert SpeculationCosts(4, 1.0, 1.0, 1.0, 0.0).measurements()[0].value == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((tiny_model(), Guess(1), PROMPT, 1), "target: got 'LlamaForCausalLM'; takes a Decoder"),
        ((None, object(), PROMPT, 1), "proposer: got 'object'; takes a proposer"),
        ((None, Guess(1), PROMPT, 0), "gamma: got 0"),
        ((None, Guess(1), PROMPT, 1, 0.7), "sampling: got 0.7; takes a Sampling"),
        ((None, Guess(1), PROMPT[0], 1), "input_ids: got"),
        ((None, Guess(1), PROMPT, 1, Sampling(), -1.0), "min_run_s: got -1.0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple, message: str) -> None:
    target, *others = arguments
    with pytest.raises(ValueError, match=message):
        measure_costs(target or decoder(), *others)


def test_costs_that_are_no_times_are_refused() -> None:
    with pytest.raises(ValueError, match="step_s: got 0.0; takes a time above 0"):
        SpeculationCosts(4, 0.0, 1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="draft_s: got -1.0"):
        SpeculationCosts(4, 1.0, 1.0, -1.0, 0.0)
