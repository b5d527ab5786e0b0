"""The load client against a server of this test's own: what it sends, counts and times."""

from dataclasses import replace

import numpy as np
import pytest

from labkit.engine.serving import RequestTimes, ServingMetrics, find_server, measure_serving
from labkit.measure import Label, Ledger
from tests.engine.openai_stand_in import MODEL, QUICK, running

STATISTICS = [f"{s}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for s in ("mean", "median", "p99")]


@pytest.fixture(scope="module")
def paced():
    """Two levels against a server of 0.15 s to the first token and 0.02 s to each of three more."""
    with running(ttft_s=0.15, tpot_s=0.02, tokens=4) as stand_in:
        result = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=(1, 4), num_prompts=4, max_tokens=4)
        yield stand_in, result


def test_definitions():
    """Times by hand: TPOT leaves the first token out, and takes what comes in one piece as the tokens it holds."""
    plain = RequestTimes(sent=10.0, chunks=(10.5, 10.6, 10.8), ended=10.8, output_tokens=3, input_tokens=7)
    assert (plain.ttft_s, plain.tpot_s, plain.e2el_s) == pytest.approx((0.5, 0.15, 0.8))
    assert plain.itls_s == pytest.approx((0.1, 0.2))
    assert replace(plain, output_tokens=7).tpot_s == pytest.approx(0.05)
    assert replace(plain, ended=11.1).tpot_s == pytest.approx(0.3)
    assert replace(plain, output_tokens=1).tpot_s is None


def test_statistics():
    """Over requests of 1 to 5 s to the first token: the mean, the median and numpy's interpolated percentile."""
    requests = [
        RequestTimes(sent=0.0, chunks=(ttft, ttft + 0.1, ttft + 0.1 * n), ended=ttft + 0.1 * n, output_tokens=3)
        for ttft, n in ((1.0, 2), (2.0, 2), (3.0, 2), (4.0, 2), (5.0, 12))
    ]
    level = ServingMetrics.of(2, [*requests, RequestTimes(0.0, error="none")], duration=20.0)
    assert (level.mean_ttft_ms, level.median_ttft_ms, level.p99_ttft_ms) == pytest.approx((3000, 3000, 4960))
    assert (level.mean_tpot_ms, level.median_tpot_ms, level.p99_tpot_ms) == pytest.approx((200, 100, 580))
    # Ten gaps, nine of 0.1 s and one of 1.1 s: every gap counts once.
    assert (level.mean_itl_ms, level.median_itl_ms, level.p99_itl_ms) == pytest.approx((200, 100, 1010))
    assert level.p99_e2el_ms == pytest.approx(4200 + 0.96 * 2000)
    assert (level.completed, level.failed, level.total_output_tokens) == (5, 1, 15)
    assert level.output_throughput == pytest.approx(15 / 20) and level.request_throughput == pytest.approx(5 / 20)


def test_latencies_are_at_least_what_the_server_takes(paced):
    for level in paced[1].levels:
        assert [len(request.itls_s) for request in level.requests] == [3] * 4
        for request in level.requests:
            assert request.ttft_s >= 0.15
            assert request.e2el_s >= 0.15 + 3 * 0.02
            # Each part of a request once: the first token's wait is in TTFT, and in nothing else.
            assert request.ttft_s + 3 * request.tpot_s == pytest.approx(request.e2el_s)
            assert sum(request.itls_s) == pytest.approx(request.e2el_s - request.ttft_s)


def test_four_at_a_time_give_more_than_one(paced):
    alone, together = paced[1].levels
    assert together.request_throughput > 1.3 * alone.request_throughput
    assert together.output_throughput > 1.3 * alone.output_throughput


def test_counts_and_throughputs_follow_from_the_requests(paced):
    for level in paced[1].levels:
        assert (level.completed, level.failed) == (4, 0)
        assert (level.total_input_tokens, level.total_output_tokens) == (4 * 7, 4 * 4)
        assert level.request_throughput == pytest.approx(4 / level.duration)
        assert level.output_throughput == pytest.approx(16 / level.duration)
        assert level.total_token_throughput == pytest.approx((28 + 16) / level.duration)
        assert level.duration >= max(request.e2el_s for request in level.requests)
    assert paced[1].levels[0].duration >= 4 * 0.21
    assert 0 < paced[1].levels[0].client_cpu <= 1.05


def test_what_is_asked_for(paced):
    stand_in, _ = paced
    assert set(stand_in.paths) == {"/v1/completions"}
    assert len(stand_in.bodies) == 4 + 4 + 4  # of them four to warm up
    for body in stand_in.bodies:
        assert body["model"] == MODEL and body["max_tokens"] == 4 and body["temperature"] == 0
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body
    # Whatever a server keeps of a prompt's beginning, no second prompt has it.
    assert len({body["prompt"][:10] for body in stand_in.bodies}) == 12
    assert all(body["prompt"].endswith(" Hello") for body in stand_in.bodies)


def test_the_table_has_the_names_of_vllm_bench_serve(paced):
    table = paced[1].table()
    assert table.columns == ("Maximum request concurrency", "1", "4")
    rows = {row[0]: row[1:] for row in table.rows}
    names = ["Successful requests", "Failed requests", "Benchmark duration (s)", "Total input tokens"]
    names += ["Total generated tokens", "Request throughput (req/s)", "Output token throughput (tok/s)"]
    names += ["Total token throughput (tok/s)"]
    names += [f"{s} {n} (ms)" for n in ("TTFT", "TPOT", "ITL", "E2EL") for s in ("Mean", "Median", "P99")]
    assert list(rows) == names
    assert rows["P99 TPOT (ms)"] == tuple(f"{level.p99_tpot_ms:.2f}" for level in paced[1].levels)
    assert rows["Total input tokens"] == ("28", "28")
    assert table.text() in repr(paced[1]) and repr(paced[1]).startswith("MEASURED")


def test_the_ledger_takes_every_figure(paced, _own_ledger):
    stand_in, result = paced
    ledger = Ledger()
    for line in result.measurements():
        ledger.append(line)
    kept = ledger.read()
    throughputs = ["request_throughput", "output_throughput", "total_token_throughput"]
    for level in result.levels:
        lines = {line.name: line for line in kept if line.params["max_concurrency"] == level.max_concurrency}
        assert set(lines) == {f"serving.{name}" for name in STATISTICS + throughputs}
        for name in STATISTICS + throughputs:
            line = lines[f"serving.{name}"]
            assert line.value == getattr(level, name) and line.label == Label.MEASURED
            assert line.unit == ("ms" if name in STATISTICS else "req/s" if name.startswith("request") else "tok/s")
            assert line.device == stand_in.url and line.params["model"] == MODEL and line.time > 0
        spread = lines["serving.median_ttft_ms"]
        samples = [1e3 * request.ttft_s for request in level.requests]
        assert (spread.p10, spread.p90) == pytest.approx(tuple(np.percentile(samples, (10, 90))))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_are_in_flight_and_no_more(concurrency):
    with running(together=concurrency, tpot_s=0.005) as stand_in:
        load = {"num_prompts": 9, "num_warmups": 0, "max_tokens": 3}
        result = measure_serving(find_server(stand_in.url), ["a", "b"], concurrency=concurrency, **load)
    assert stand_in.most_in_flight == concurrency
    assert result.levels[0].completed == 9


def test_prompts_are_used_in_turn_and_as_they_are_where_asked():
    with running() as stand_in:
        measure_serving(find_server(stand_in.url), ["a", "b"], concurrency=1, distinct_prompts=False, **QUICK)
    assert [body["prompt"] for body in stand_in.bodies] == ["a", "b", "a", "b"]


def test_by_default_each_level_has_four_rounds_and_every_prompt():
    with running(tokens=1) as stand_in:
        result = measure_serving(find_server(stand_in.url), list("abcdef"), concurrency=[1, 2], max_tokens=1)
    assert [level.completed for level in result.levels] == [6, 8]
    # One token has no time per further token.
    assert all(level.mean_tpot_ms is None and level.p99_itl_ms is None for level in result.levels)
    assert dict((row[0], row[1]) for row in result.table().rows)["Mean TPOT (ms)"] == "-"
    assert not [line for line in result.measurements() if "tpot" in line.name]


def test_chat_waits_for_text_and_not_for_the_role():
    with running(ttft_s=0.05) as stand_in:
        server = find_server(stand_in.url)
        result = measure_serving(server, ["Hello"], concurrency=1, endpoint="chat", ignore_eos=True, **QUICK)
    assert set(stand_in.paths) == {"/v1/chat/completions"}
    assert stand_in.bodies[0]["messages"][0]["role"] == "user" and stand_in.bodies[0]["ignore_eos"] is True
    level = result.levels[0]
    assert level.completed == 4 and level.median_ttft_ms >= 50
    assert [len(request.chunks) for request in level.requests] == [3] * 4


def test_several_tokens_in_a_piece_count_as_the_server_counts_them():
    with running(tokens=6, tokens_per_chunk=3, tpot_s=0.01) as stand_in:
        level = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=1, **QUICK).levels[0]
    assert level.total_output_tokens == 4 * 6
    for request in level.requests:
        assert len(request.chunks) == 2
        assert request.tpot_s == pytest.approx((request.chunks[1] - request.chunks[0]) / 5)


def test_without_usage_chunks_are_counted_and_it_says_so():
    with running(usage=False, tokens=6, tokens_per_chunk=2) as stand_in:
        result = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=1, **QUICK)
    level = result.levels[0]
    assert level.total_output_tokens == 4 * 3
    assert level.total_input_tokens is None and level.total_token_throughput is None
    assert "a chunk counts as one token" in repr(result)
    assert {request.counted_by for request in level.requests} == {"chunks"}


def test_an_end_without_text_ends_the_request_and_is_no_piece_of_text():
    with running(silent_end_s=0.1, tokens=3) as stand_in:
        level = measure_serving(find_server(stand_in.url), ["Hello"], concurrency=1, **QUICK).levels[0]
    for request in level.requests:
        assert len(request.chunks) == 3 and request.ended > request.chunks[-1]
        assert request.e2el_s >= 0.1
