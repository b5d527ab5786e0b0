"""One streamed request, and when each part of its answer came."""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_LONGEST_ERROR = 200


# Of one request; a server that says more is wrong.
_MOST_TOKENS = 10**8


@dataclass(frozen=True)
class RequestTimes:
    """What a client sees of one request; times in seconds of one clock.

    sent: as it leaves. chunks: each piece of the answer that carries text. ended: the last piece of the answer, which
    may carry none, as an end-of-sequence token does. input_tokens, output_tokens: as the server counts them in its
    `usage`; without one, output_tokens is the number of chunks, input_tokens None, and `counted_by` is "chunks".
    error: why the request failed, None for one that was answered to its end.
    """

    sent: float
    chunks: tuple[float, ...] = ()
    ended: float = 0.0
    output_tokens: int = 0
    input_tokens: int | None = None
    counted_by: str = "usage"
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to first token: from sending to the first text."""
        return self.chunks[0] - self.sent

    @property
    def e2el_s(self) -> float:
        """End-to-end latency: from sending to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, the first one excluded; None for an answer of one token, which has none.

        The answer's tokens after the first, in the time after the first: what a server sends in one piece counts as
        the tokens it holds.
        """
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itls_s(self) -> tuple[float, ...]:
        """Inter-token latencies: from each piece of text to the next."""
        return tuple(after - before for before, after in pairwise(self.chunks))


class _Watch:
    """Notes the times of one answer, of at most `most` tokens, as its chunks come in."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.times: list[float] = []
        self.usage: object = None
        self.finished = False
        self.sent = self.ended = time.perf_counter()

    def see(self, chunk: object, now: float) -> bool:
        """Whether a chunk held anything of an answer: text, its end, or what it counts."""
        before = len(self.times), self.finished, self.usage
        self.usage = getattr(chunk, "usage", None) or self.usage
        for choice in getattr(chunk, "choices", None) or ():
            self.ended = now
            self.finished |= getattr(choice, "finish_reason", None) is not None
            if _text(choice):
                self.times.append(now)
        return before != (len(self.times), self.finished, self.usage)

    @property
    def flooded(self) -> bool:
        """Whether more came than was asked for: each piece of text holds a token or more."""
        return max(len(self.times), _count(self.usage, "completion_tokens") or 0) > self.most

    def result(self, error: str | None = None) -> RequestTimes:
        if error is None and self.flooded:
            error = f"the server sent more than the {self.most} tokens that it was asked for at most"
        if error is None and not self.finished:
            error = "the stream ended before the answer did"
        if error is None and not self.times:
            error = "an answer without text"
        counted = _count(self.usage, "completion_tokens")
        return RequestTimes(
            self.sent,
            tuple(self.times),
            self.ended,
            counted or len(self.times),
            _count(self.usage, "prompt_tokens"),
            "usage" if counted else "chunks",
            error,
        )


def _count(usage: object, name: str) -> int | None:
    """A number of tokens, where the server gives one that can be one."""
    found = getattr(usage, name, None)
    return found if type(found) is int and 0 < found < _MOST_TOKENS else None


def _text(choice: object) -> str:
    """The text of a piece: of a completion, of a chat's message, or of what a reasoning model thinks first."""
    delta = getattr(choice, "delta", None)
    if delta is None:
        return getattr(choice, "text", None) or ""
    fields = ("content", "reasoning_content", "reasoning")
    return next((text for name in fields if (text := getattr(delta, name, None))), "")


async def stream_request(
    client: "AsyncOpenAI", endpoint: str, prompt: str, options: dict[str, object], silence_s: float
) -> RequestTimes:
    """Send one prompt to "completions" or "chat", and time its answer; whatever goes wrong is in `.error`.

    options: with `max_tokens`. silence_s: seconds that may pass without a piece of the answer, whatever else comes.
    """
    clock, watch = asyncio.get_running_loop().time, _Watch(options["max_tokens"])
    options = options | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        if endpoint == "chat":
            opening = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **options)
        else:
            opening = client.completions.create(prompt=prompt, **options)
        async with asyncio.timeout(silence_s) as limit, await opening as stream:
            async for chunk in stream:
                if watch.see(chunk, time.perf_counter()):
                    limit.reschedule(clock() + silence_s)
                if watch.flooded:
                    break
    except TimeoutError:
        return watch.result(f"TimeoutError: nothing of an answer in {silence_s:g} s")
    except Exception as error:  # a request that fails is counted, and the others go on
        return watch.result(f"{type(error).__name__}: {error}"[:_LONGEST_ERROR])
    return watch.result()
