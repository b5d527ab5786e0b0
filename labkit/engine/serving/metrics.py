"""What a client measured of a server, by concurrency, in the names of `vllm bench serve`.

The names are those of its printed table and of the JSON that it saves (vllm/benchmarks/serve.py, `calculate_metrics`
and `process_one_metric`; https://docs.vllm.ai/en/latest/cli/bench/serve/), and so are the definitions: throughputs are
of the requests that succeeded, over the whole duration; percentiles are interpolated; TPOT is a mean within a request,
ITL every gap of every request. One differs: vLLM takes the first piece of a stream as the first token, here it is the
first that carries text, since some servers open a chat with an empty piece.
"""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

import numpy as np

from labkit._table import Table
from labkit.engine.serving.request import RequestTimes
from labkit.engine.serving.server import Server
from labkit.measure import Measurement, library_versions

_THROUGHPUTS = {
    "request_throughput": ("Request throughput (req/s)", "req/s"),
    "output_throughput": ("Output token throughput (tok/s)", "tok/s"),
    "total_token_throughput": ("Total token throughput (tok/s)", "tok/s"),
}
_COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "duration": "Benchmark duration (s)",
    "total_input_tokens": "Total input tokens",
    "total_output_tokens": "Total generated tokens",
}
_LATENCIES = ("ttft", "tpot", "itl", "e2el")
_STATISTICS = ("mean", "median", "p99")
# Above this share of one core the client, and not the server, may be what limits.
_BUSY_CLIENT = 0.7


@dataclass(frozen=True)
class ServingMetrics:
    """One level of concurrency. Latencies in milliseconds, None where no request has one; throughputs per second.

    duration: seconds from the first request's sending to the last one's end. total_input_tokens and
    total_token_throughput: None where the server does not count the prompts. client_cpu: the share of one core that
    the client itself was busy. requests: all of them, failed ones too.
    """

    max_concurrency: int
    completed: int
    failed: int
    duration: float
    total_input_tokens: int | None
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float | None
    mean_ttft_ms: float | None
    median_ttft_ms: float | None
    p99_ttft_ms: float | None
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    p99_tpot_ms: float | None
    mean_itl_ms: float | None
    median_itl_ms: float | None
    p99_itl_ms: float | None
    mean_e2el_ms: float | None
    median_e2el_ms: float | None
    p99_e2el_ms: float | None
    client_cpu: float = 0.0
    requests: tuple[RequestTimes, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, max_concurrency: int, requests: Sequence[RequestTimes], duration: float, client_cpu: float = 0.0
    ) -> "ServingMetrics":
        """From the requests of a level and the seconds that they took together."""
        done = [request for request in requests if request.error is None]
        inputs = [request.input_tokens for request in done]
        total_input = None if None in inputs else sum(inputs)
        total_output = sum(request.output_tokens for request in done)
        statistics = {}
        for name in _LATENCIES:
            statistics |= _statistics(name, latencies_ms(done, name))
        return cls(
            max_concurrency=max_concurrency,
            completed=len(done),
            failed=len(requests) - len(done),
            duration=duration,
            total_input_tokens=total_input,
            total_output_tokens=total_output,
            request_throughput=len(done) / duration,
            output_throughput=total_output / duration,
            total_token_throughput=None if total_input is None else (total_input + total_output) / duration,
            client_cpu=client_cpu,
            requests=tuple(requests),
            **statistics,
        )

    @property
    def errors(self) -> dict[str, int]:
        """Each reason that requests failed for, and how many did."""
        return dict(Counter(request.error for request in self.requests if request.error is not None))


def latencies_ms(requests: Sequence[RequestTimes], name: str) -> list[float]:
    """All samples of "ttft", "tpot", "itl" or "e2el" in milliseconds, of the requests that succeeded."""
    done = [request for request in requests if request.error is None]
    if name == "itl":
        return [1e3 * gap for request in done for gap in request.itls_s]
    samples = (getattr(request, f"{name}_s") for request in done)
    return [1e3 * sample for sample in samples if sample is not None]


def _statistics(name: str, samples: list[float]) -> dict[str, float | None]:
    values = (np.mean(samples), np.median(samples), np.percentile(samples, 99)) if samples else (None,) * 3
    return {
        f"{statistic}_{name}_ms": None if value is None else float(value)
        for statistic, value in zip(_STATISTICS, values, strict=True)
    }


@dataclass(frozen=True, repr=False)
class ServingResult:
    """MEASURED: a server under load, one ServingMetrics a level of concurrency."""

    server: Server
    endpoint: str
    max_tokens: int
    levels: tuple[ServingMetrics, ...]

    def __repr__(self) -> str:
        head = f"MEASURED: {self.server.model} at {self.server.base_url}, at most {self.max_tokens} tokens an answer"
        return "\n".join([head, "", self.table().text(), *(f"note: {note}" for note in self.notes())])

    def table(self) -> Table:
        """A column a level, a row a metric, as `vllm bench serve` names it."""
        rows = [*_COUNTS.items(), *((name, title) for name, (title, _) in _THROUGHPUTS.items())]
        rows += [
            (f"{statistic}_{name}_ms", f"{statistic.capitalize()} {name.upper()} (ms)")
            for name in _LATENCIES
            for statistic in _STATISTICS
        ]
        columns = ("Maximum request concurrency", *(str(level.max_concurrency) for level in self.levels))
        return Table(columns, tuple((title, *(_cell(getattr(m, name)) for m in self.levels)) for name, title in rows))

    def notes(self) -> list[str]:
        """What a reader of the figures has to know besides them."""
        notes = []
        for level in self.levels:
            at = f"at concurrency {level.max_concurrency}"
            notes += [f"{at}, {count} requests failed: {error}" for error, count in level.errors.items()]
            if level.client_cpu > _BUSY_CLIENT:
                notes.append(f"{at}, the client was busy {level.client_cpu:.0%} of the time: it may be what limits")
        counted = {request.counted_by for m in self.levels for request in m.requests if request.error is None}
        if "chunks" in counted:
            notes.append("the server gives no usage: a chunk counts as one token, whatever it holds")
        return notes

    def measurements(self) -> list[Measurement]:
        """Every figure of every level for the ledger, as `serving.<name>`; medians carry their 10th and 90th
        percentile."""
        units = {f"{s}_{name}_ms": "ms" for name in _LATENCIES for s in _STATISTICS}
        units |= {name: unit for name, (_, unit) in _THROUGHPUTS.items()}
        return [
            self._measurement(level, name, unit)
            for level in self.levels
            for name, unit in units.items()
            if getattr(level, name) is not None
        ]

    def _measurement(self, level: ServingMetrics, name: str, unit: str) -> Measurement:
        spread = {}
        if name.startswith("median_"):
            samples = latencies_ms(level.requests, name.removeprefix("median_").removesuffix("_ms"))
            p10, p90 = np.percentile(samples, (10, 90))
            spread = {"p10": float(p10), "p90": float(p90)}
        params = {"max_concurrency": level.max_concurrency, "max_tokens": self.max_tokens, "endpoint": self.endpoint}
        params |= {"model": self.server.model, "completed": level.completed, "failed": level.failed}
        return Measurement(
            f"serving.{name}",
            getattr(level, name),
            unit,
            params=params,
            backend=self.server.owned_by,
            # The server's machine is what was measured, and all that a client knows of it is where it is.
            device=self.server.base_url,
            versions=library_versions() | {"openai": version("openai")},
            time=time.time(),
            **spread,
        )


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"
