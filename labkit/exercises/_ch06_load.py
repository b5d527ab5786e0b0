"""Exercise `read_load`: from the moments when tokens came, what a load test tells, and where more load brings no more.

Metrics as vLLM's `bench serve` names them: TTFT, TPOT without the first token, request and output throughput.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch

from labkit.exercises._ch06_reference import all_near, as_numbers, own
from labkit.exercises._exercise import Answer, Exercise, Failed, expect

_SIGNATURE = "read_load(levels) -> ({concurrency: (ttft, tpot, requests_per_s, tokens_per_s)}, knee)"
_GROWTH = 1.1


@dataclass(frozen=True)
class Request:
    """sent: when; times: when each of its tokens came, nothing for a request that failed. Seconds of one clock."""

    sent: float
    times: tuple[float, ...] = ()


Levels = dict[int, list[Request]]
_NAMES = ("TTFT", "TPOT", "requests/s", "tokens/s")


def _done(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.times]


def _duration(requests: list[Request]) -> float:
    return max(r.times[-1] for r in _done(requests)) - min(r.sent for r in _done(requests))


def _longer(requests: list[Request]) -> list[Request]:
    return [request for request in requests if len(request.times) > 1]


def _row(requests: list[Request]) -> tuple[float, ...]:
    done, duration = _done(requests), _duration(requests)
    return (
        fmean(r.times[0] - r.sent for r in done),
        fmean((r.times[-1] - r.times[0]) / (len(r.times) - 1) for r in _longer(done)),
        len(done) / duration,
        sum(len(r.times) for r in done) / duration,
    )


def _knee(speeds: Mapping[int, float]) -> int:
    levels = sorted(speeds)
    for level, more in zip(levels, levels[1:], strict=False):
        if speeds[more] < _GROWTH * speeds[level]:
            return level
    return levels[-1]


Reading = Callable[[list[Request]], float]
# By the figure in a row, what a usual mistake makes of it.
_MISTAKES: tuple[dict[str, Reading], ...] = (
    {
        "each request waits from its own sending": lambda rs: fmean(
            r.times[0] - min(x.sent for x in rs) for r in _done(rs)
        ),
        "this is the whole answer's time": lambda rs: fmean(r.times[-1] - r.sent for r in _done(rs)),
    },
    {
        "the wait for the first token is TTFT, and no part of TPOT": lambda rs: fmean(
            (r.times[-1] - r.sent) / len(r.times) for r in _done(rs)
        ),
        "the time after the first token begins at the first token": lambda rs: fmean(
            (r.times[-1] - r.sent) / (len(r.times) - 1) for r in _longer(rs)
        ),
        "n tokens have n - 1 gaps between them": lambda rs: fmean(
            (r.times[-1] - r.times[0]) / len(r.times) for r in _longer(rs)
        ),
        "a request of one token has no TPOT, not one of 0": lambda rs: fmean(
            (r.times[-1] - r.times[0]) / max(1, len(r.times) - 1) for r in _done(rs)
        ),
        "take each request's TPOT, then their mean: here a long answer counts for more": lambda rs: (
            sum(r.times[-1] - r.times[0] for r in _longer(rs)) / sum(len(r.times) - 1 for r in _longer(rs))
        ),
    },
    {
        "a request that failed counts nowhere": lambda rs: len(rs) / _duration(rs),
        "requests run beside each other: not the sum of their times": lambda rs: (
            len(_done(rs)) / sum(r.times[-1] - r.sent for r in _done(rs))
        ),
        "the test begins when the first request is sent": lambda rs: (
            len(_done(rs)) / (max(r.times[-1] for r in _done(rs)) - min(r.times[0] for r in _done(rs)))
        ),
    },
    {
        "the first tokens are output, too": lambda rs: sum(len(r.times) - 1 for r in _done(rs)) / _duration(rs),
        "requests run beside each other: this is the speed that one of them sees": lambda rs: fmean(
            len(r.times) / (r.times[-1] - r.sent) for r in _done(rs)
        ),
        "requests run beside each other: not the sum of their times": lambda rs: (
            sum(len(r.times) for r in _done(rs)) / sum(r.times[-1] - r.sent for r in _done(rs))
        ),
    },
)  # fmt: skip


def _level(seed: int, concurrency: int, step_s: float, most: int = 9) -> list[Request]:
    """Three rounds of requests, each with a wait and a pace of its own, one round with one that fails."""
    noise = torch.rand(100, generator=torch.Generator().manual_seed(seed)).tolist()
    requests, now = [], 10.0 + seed
    for _ in range(3):
        sent, ends = now, []
        for _ in range(concurrency):
            count = 1 + int(noise.pop() * most)
            first, pace = sent + step_s * (1 + 4 * noise.pop()), 1 + noise.pop()
            requests.append(Request(sent, tuple(first + step_s * pace * i for i in range(count))))
            ends.append(requests[-1].times[-1])
        now = max(ends)
    return [*requests[:1], Request(requests[0].sent + step_s), *requests[1:]]


def _steady(rates: Mapping[int, float]) -> Levels:
    """Levels whose output throughput is exactly `rates`: one request of ten tokens each, in equal steps."""
    return {
        level: [Request(5.0, tuple(5.0 + 10 * level / rate * (i + 1) / 10 for i in range(10))) for _ in range(level)]
        for level, rate in rates.items()
    }


def _cases() -> list[tuple[str, Levels]]:
    slowed = {1: 0.05, 2: 0.055, 4: 0.07, 8: 0.12}
    random = {level: _level(level, level, step) for level, step in slowed.items()}
    return [
        ("one request at a time", {1: _level(3, 1, 0.05)}),
        ("four levels of load", random),
        ("four levels, the highest first", dict(reversed(random.items()))),
        ("throughput that doubles to the end", _steady({1: 20.0, 2: 40.0, 4: 80.0})),
        ("throughput that grows by 5% after 4", _steady({1: 20.0, 2: 38.0, 4: 60.0, 8: 63.0, 16: 64.0})),
        ("throughput that falls after 8", _steady({2: 30.0, 8: 90.0, 32: 70.0, 64: 120.0})),
        ("throughput that grows by 20% at each level", _steady({1: 20.0, 4: 24.0, 16: 28.8})),
        ("throughput that never grows", _steady({4: 50.0, 8: 50.0, 16: 50.0})),
    ]


_KNEES: dict[str, Callable[[Mapping[int, float]], int]] = {
    "the level itself is asked for, from which on more load brings less than 10%, not the one after it": lambda s: next(
        (b for a, b in zip(sorted(s), sorted(s)[1:], strict=False) if s[b] < _GROWTH * s[a]), max(s)
    ),
    "the levels come in any order: sort them": lambda s: next(
        (a for a, b in zip(list(s), list(s)[1:], strict=False) if s[b] < _GROWTH * s[a]), list(s)[-1]
    ),
    "this is the level with the highest throughput": lambda s: max(s, key=lambda level: s[level]),
    "less than 10% more ends it, and not only a fall": lambda s: next(
        (a for a, b in zip(sorted(s), sorted(s)[1:], strict=False) if s[b] < s[a]), max(s)
    ),
}


def _test_rows(found: object, levels: Levels, what: str) -> None:
    expect(isinstance(found, dict), f"the rows should be a dict by concurrency; got {type(found).__name__}")
    expect(sorted(found) == sorted(levels), f"{what}: a row for each of {sorted(levels)}; got {sorted(found)}")
    rows = {n: as_numbers(found[n], 4, "(ttft, tpot, requests_per_s, tokens_per_s)") for n in levels}
    for place, name in enumerate(_NAMES):
        got, wanted = [rows[n][place] for n in levels], [_row(levels[n])[place] for n in levels]
        for n, a, b in zip(levels, got, wanted, strict=True):
            if all_near([a], [b]):
                continue
            readings = _MISTAKES[place].items()
            why = (f": {text}" for text, rule in readings if all_near(got, [rule(levels[m]) for m in levels]))
            expect(False, f"{what}, concurrency {n}: {name} is {b:.4g}; yours says {a:.4g}{next(why, '')}")


def _run(answer: Answer, levels: Levels, what: str) -> object:
    """The knee, once the rows are right."""
    given = {level: list(requests) for level, requests in levels.items()}
    value = own(lambda: answer(given))
    expect(given == levels, "what you were given should stay as it is")
    pair = isinstance(value, tuple | list) and len(value) == 2
    expect(pair, f"return two things, (rows, knee); got {type(value).__name__}")
    _test_rows(value[0], levels, what)
    return value[1]


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    cases = _cases()
    knees = [_run(answer, levels, what) for what, levels in cases]
    speeds = [{n: _row(requests)[3] for n, requests in levels.items()} for _, levels in cases]
    for (what, levels), knee, speed in zip(cases, knees, speeds, strict=True):
        if knee == _knee(speed):
            continue
        if not (isinstance(knee, int) and knee in levels):
            raise Failed(f"{what}: the knee should be one of {sorted(levels)}; got {knee!r:.40}")
        why = (f": {text}" for text, rule in _KNEES.items() if knees == [rule(s) for s in speeds])
        said = ", ".join(f"{n}: {speed[n]:.3g} tokens/s" for n in sorted(speed))
        expect(False, f"{what} ({said}): the knee is {_knee(speed)}; yours says {knee}{next(why, '')}")
    return f"the four metrics of {sum(map(len, speeds))} levels, and the knee of each of {len(cases)} curves"


READ_LOAD = Exercise(
    name="read_load",
    chapter=6,
    task="Read a load curve: TTFT, TPOT and both throughputs of each level, and the concurrency from which more load "
    "brings less than 10% more tokens a second.",
    signature=_SIGNATURE,
    hints=(
        "Begin with one level. Which requests have a TTFT, which have a TPOT, and when does the level begin and end?",
        "TPOT is (times[-1] - times[0]) / (len(times) - 1), for requests of two tokens or more, then the mean over "
        "them. Both throughputs are over max(times[-1]) - min(sent).",
        "for n, more in zip(levels, levels[1:]) of the sorted levels: if tokens_per_s[more] < 1.1 * tokens_per_s[n], "
        "the knee is n; after the loop it is the last one.",
    ),
    test=_test,
)
