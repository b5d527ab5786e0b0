"""The load: a set number of requests in flight, through the official `openai` client."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

from labkit import _check
from labkit._progress import progress
from labkit.engine.serving.event_loop import in_own_thread
from labkit.engine.serving.metrics import ServingMetrics, ServingResult
from labkit.engine.serving.request import RequestTimes, stream_request
from labkit.engine.serving.server import Server, openai_library

ENDPOINTS = ("completions", "chat")
# So many rounds of requests at each level: the first and the last are not all in flight together.
_ROUNDS = 4
_MOST_IN_FLIGHT = 1024
# A server may send something other than the answer, so as to keep the line open, for so many times `timeout_s`.
_SILENCES = 2


@dataclass(frozen=True)
class _Load:
    """A run as it was asked for, with its arguments checked."""

    server: Server
    prompts: tuple[str, ...]
    concurrency: tuple[int, ...]
    max_tokens: int
    num_prompts: int | None
    num_warmups: int
    endpoint: str
    temperature: float
    ignore_eos: bool
    distinct_prompts: bool
    timeout_s: float

    def requests_at(self, concurrency: int) -> int:
        return self.num_prompts or max(len(self.prompts), _ROUNDS * concurrency)

    def texts(self, count: int) -> Iterator[str]:
        """`count` prompts, each with a beginning of its own: a server keeps what it computed of a prompt's beginning
        (vLLM by blocks of 16 tokens), and a second run would find the first one's prefill done."""
        for prompt in islice(cycle(self.prompts), count):
            yield f"[{uuid.uuid4().hex[:12]}] {prompt}" if self.distinct_prompts else prompt

    def options(self) -> dict[str, object]:
        options = {"model": self.server.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return options | ({"extra_body": {"ignore_eos": True}} if self.ignore_eos else {})


def measure_serving(
    server: Server,
    prompts: Sequence[str],
    *,
    concurrency: int | Sequence[int] = (1, 2, 4, 8),
    max_tokens: int = 64,
    num_prompts: int | None = None,
    num_warmups: int | None = None,
    endpoint: str = "completions",
    temperature: float = 0.0,
    ignore_eos: bool = False,
    distinct_prompts: bool = True,
    timeout_s: float = 120.0,
) -> ServingResult:
    """Send prompts to a server at each level of concurrency, and time its streamed answers.

    The loop is closed: at each level so many requests are in flight, and the next leaves when one has ended
    (`--max-concurrency` of `vllm bench serve`, with all requests ready at once). num_prompts: requests a level, None
    for four times its concurrency and at least one a prompt; the prompts are used in turn. num_warmups: requests before
    all, not counted, None for as many as are ever in flight, so that every connection is open. endpoint: "completions",
    which sends a prompt as it is, or "chat". ignore_eos: answers of exactly `max_tokens`, so that levels compare;
    vLLM's own, other servers may refuse it. distinct_prompts: put a few characters of its own before each prompt,
    against the server's prefix cache. timeout_s: seconds that a request may go without a byte;
    twice as many without a piece of its answer. A failed request is not
    sent again: it is counted, and its reason kept.
    Works in a notebook too: the requests run in a thread and an event loop of their own.
    Errors: ValueError for arguments, ImportError without the package `openai`.
    """
    _check.require(isinstance(server, Server), "server", server, "a Server, as find_server returns where there is one")
    given = isinstance(prompts, Sequence) and not isinstance(prompts, str) and len(prompts) > 0
    given = given and all(isinstance(prompt, str) and prompt for prompt in prompts)
    _check.require(given, "prompts", prompts, "a list of texts")
    levels = concurrency if isinstance(concurrency, list | tuple) else (concurrency,)
    _check.require(len(levels) > 0, "concurrency", concurrency, "at least one number of requests in flight")
    levels = tuple(_check.integer("concurrency", level, 1, _MOST_IN_FLIGHT) for level in levels)
    if num_prompts is not None:  # fewer could never be so many in flight
        _check.integer("num_prompts", num_prompts, max(levels))
    load = _Load(
        server,
        tuple(prompts),
        levels,
        _check.integer("max_tokens", max_tokens, 1),
        num_prompts,
        max(levels) if num_warmups is None else _check.integer("num_warmups", num_warmups, 0),
        _check.choice("endpoint", endpoint, ENDPOINTS),
        _check.number("temperature", temperature, 0.0),
        bool(ignore_eos),
        bool(distinct_prompts),
        _check.number("timeout_s", timeout_s, 0.1),
    )
    openai_library()
    total = load.num_warmups + sum(load.requests_at(level) for level in levels)
    # No turn on this machine is taken: a server here that takes one for each answer would wait for its own client.
    with progress("Requests", total, "requests") as update:
        return ServingResult(server, endpoint, max_tokens, in_own_thread(_all_levels(load, update)))


async def _all_levels(load: _Load, update: Callable[[int], None]) -> tuple[ServingMetrics, ...]:
    # A request that is tried again in silence would count as one slow success.
    settings = {"base_url": load.server.base_url, "api_key": load.server.api_key or "none", "max_retries": 0}
    async with openai_library().AsyncOpenAI(timeout=load.timeout_s, **settings) as client:
        done = 0

        async def send(prompt: str) -> RequestTimes:
            nonlocal done
            times = await stream_request(client, load.endpoint, prompt, load.options(), _SILENCES * load.timeout_s)
            done += 1
            update(done)
            return times

        await _closed_loop(send, load.texts(load.num_warmups), max(load.concurrency))
        return tuple([await _level(send, load, concurrency) for concurrency in load.concurrency])


async def _level(
    send: Callable[[str], Coroutine[Any, Any, RequestTimes]], load: _Load, concurrency: int
) -> ServingMetrics:
    texts = iter(list(load.texts(load.requests_at(concurrency))))
    begin, busy = time.perf_counter(), time.thread_time()
    requests = await _closed_loop(send, texts, concurrency)
    duration, busy = time.perf_counter() - begin, time.thread_time() - busy
    return ServingMetrics.of(concurrency, requests, duration, busy / duration)


async def _closed_loop(
    send: Callable[[str], Coroutine[Any, Any, RequestTimes]], texts: Iterator[str], concurrency: int
) -> list[RequestTimes]:
    """Send all texts, `concurrency` at a time."""

    async def one_after_another() -> list[RequestTimes]:
        # All of these draw from one iterator, so that none waits for another's text.
        return [await send(text) for text in texts]

    return list(chain(*await asyncio.gather(*(one_after_another() for _ in range(concurrency)))))
