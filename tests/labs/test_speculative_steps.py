import threading
from types import SimpleNamespace

import pytest
import torch

from labkit.engine.decode import Decoder
from labkit.labs import _speculative_steps
from labkit.labs._speculative_models import draft_tree
from labkit.labs._speculative_steps import fastest_threads
from labkit.measure import device_lock, time_op
from tests.labs.speculative_fixtures import (
    CPU,
    Scripted,
    computed,
    continuation,
    loaded,
    run,
)

pytestmark = pytest.mark.usefixtures("fixed_speculative")


@pytest.fixture(scope="module")
def model():
    return loaded()


@pytest.fixture(scope="module")
def truth(model):
    return continuation(model)


def test_an_op_that_clocks_itself_does_not_wait_for_the_lab(model, truth):
    """A lab holds the device's lock, and a first call of some ops takes it again."""
    proposer = Scripted(truth)
    proposer.on_ask = lambda: time_op(lambda: None, device="cpu", min_run_s=0.0)
    done = threading.Event()

    def measure() -> None:
        with device_lock(CPU):
            run(computed(proposer, model), 2)
        done.set()

    threading.Thread(target=measure, daemon=True).start()
    assert done.wait(30)


def test_the_thread_count_is_chosen_by_measurement_and_put_back(model, truth, monkeypatch):
    before, asked = torch.get_num_threads(), []

    def fastest(decoder, candidates, cancelled):
        asked.append(candidates)
        torch.set_num_threads(1)
        return 1

    monkeypatch.setattr(_speculative_steps, "fastest_threads", fastest)
    compute = computed(Scripted(truth), model)
    try:
        torch.set_num_threads(2)
        assert [run(compute, gamma)[-1].threads for gamma in (1, 2)] == [1, 1]
        assert torch.get_num_threads() == 2 and asked == [(1, 2)], "once for a target"
    finally:
        torch.set_num_threads(before)


def test_the_faster_thread_count_is_set(model, monkeypatch):
    before, asked, clock, seconds = torch.get_num_threads(), [], [0.0], {}
    monkeypatch.setattr(_speculative_steps, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Decoding(Decoder):
        """On a clock of its own."""

        def forward(self, *args, **options):
            asked.append(torch.get_num_threads())
            clock[0] += seconds[asked[-1]]
            return super().forward(*args, **options)

    try:
        for one, two, best in ((0.004, 0.001, 2), (0.001, 0.004, 1)):
            seconds.update({1: one, 2: two})
            asked.clear()
            assert fastest_threads(Decoding(model), (1, 2), lambda: False) == torch.get_num_threads() == best
            assert asked[:8] == [1, 1, 2, 2] * 2, "in turn"
        asked.clear()
        fastest_threads(Decoding(model), (1, 2), lambda: True)
        assert not asked
    finally:
        torch.set_num_threads(before)


def test_the_tree_is_cut_and_grown_to_the_depth():
    assert [draft_tree(depth).depth for depth in (1, 2, 4, 8)] == [1, 2, 4, 8]
    assert draft_tree(1).widths == (2,) and draft_tree(4).widths == (2, 3, 1, 1) and len(draft_tree(8)) == 11
