"""The load client where something goes wrong: requests that fail, a run that is cut short, wrong arguments."""

import asyncio
import re
import signal
import time
from threading import Thread, main_thread

import pytest

from labkit.engine.serving import NoServer, Server, find_server, measure_serving
from labkit.measure import device_lock
from tests.engine.openai_stand_in import MODEL, QUICK, running

LATENCIES = [f"{s}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "p99")]


def test_failures_are_counted_and_named():
    with running(refused={0, 3}, broken={1}, cut={4}) as stand_in:
        load = QUICK | {"num_prompts": 8}
        result = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=2, **load)
    level = result.levels[0]
    assert (level.completed, level.failed) == (4, 4)
    assert len(stand_in.bodies) == 8  # none was sent again
    assert level.total_output_tokens == 4 * 3
    assert level.request_throughput == pytest.approx(4 / level.duration)
    assert sorted(level.errors.values()) == [1, 1, 2]
    for reason in ("out of memory", "the engine died", "the stream ended before the answer did"):
        assert reason in repr(result)
    assert all(line.params["failed"] == 4 for line in result.measurements())


def test_a_server_that_sends_anything_but_an_answer_does_not_hold_a_run():
    begin = time.monotonic()
    with running(keeps_alive=True) as stand_in:
        server = find_server(stand_in.url)
        result = measure_serving(server, ["Hello"], concurrency=1, timeout_s=0.3, **QUICK | {"num_prompts": 2})
    assert result.levels[0].failed == 2 and time.monotonic() - begin < 10
    assert "nothing of an answer in 0.6 s" in repr(result)


@pytest.mark.parametrize("more", [{"tokens": 100_000}, {"counts": 10**7}])
def test_a_server_that_sends_or_counts_more_than_was_asked_for_has_failed(more):
    with running(**more) as stand_in:
        result = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=1, **QUICK | {"num_prompts": 1})
    assert result.levels[0].failed == 1 and "more than the 6 tokens" in repr(result)


def test_a_server_that_fails_every_request_gives_no_latency():
    with running(refused=set(range(9))) as stand_in:
        result = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=1, **QUICK)
    level = result.levels[0]
    assert (level.completed, level.failed, level.output_throughput) == (0, 4, 0)
    assert all(getattr(level, name) is None for name in LATENCIES)
    assert "4 requests failed" in repr(result)


def test_a_request_that_hangs_fails_after_its_time():
    with running(ttft_s=1.0) as stand_in:
        load = {"num_prompts": 2, "num_warmups": 0, "timeout_s": 0.2}
        level = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=2, **load).levels[0]
    assert level.failed == 2 and level.duration < 0.9
    assert "timed out" in next(iter(level.errors)).lower()


def test_a_server_here_may_take_its_turn_for_each_answer():
    with running(around_answer=lambda: device_lock("cpu")) as stand_in:
        load = QUICK | {"timeout_s": 60.0}
        result = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=2, **load)
    assert result.levels[0].completed == 4


def test_it_runs_where_a_loop_runs_already():
    async def cell(server):
        return measure_serving(server, ["Hello"], concurrency=2, **QUICK)

    with running() as stand_in:
        result = asyncio.run(cell(find_server(stand_in.url)))
    assert result.levels[0].completed == 4


@pytest.fixture
def interruptible():
    """What is started in the background ignores an interrupt, tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_the_run(interruptible):
    """The request under way is given up, and those after it are never sent."""
    with running(ttft_s=1.0) as stand_in:
        server = find_server(stand_in.url)

        def interrupt_once_it_runs():
            while not stand_in.bodies:
                time.sleep(0.01)
            # As Jupyter's stop button does: a signal, which wakes a thread that waits.
            signal.pthread_kill(main_thread().ident, signal.SIGINT)

        Thread(target=interrupt_once_it_runs, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            measure_serving(server, ["Hello"], concurrency=1, **QUICK)
        assert len(stand_in.bodies) == 1


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"server": NoServer("none")}, "server"),
        ({"prompts": []}, "prompts"),
        ({"prompts": "Hello"}, "prompts"),
        ({"prompts": ["Hello", ""]}, "prompts"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": ()}, "concurrency"),
        ({"concurrency": (1, 2.5)}, "concurrency"),
        ({"concurrency": (1, 8), "num_prompts": 4}, "num_prompts"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"num_warmups": -1}, "num_warmups"),
        ({"endpoint": "responses"}, "endpoint"),
        ({"temperature": -1.0}, "temperature"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong, names):
    given = {"server": Server("http://127.0.0.1:9/v1", MODEL), "prompts": ["Hello"]} | wrong
    with pytest.raises(ValueError, match=rf"^{re.escape(names)}: got"):
        measure_serving(given.pop("server"), given.pop("prompts"), **given)
