"""Measuring a server from the outside: any OpenAI-compatible address, in the names of `vllm bench serve`."""

from labkit.engine.serving.load import measure_serving
from labkit.engine.serving.metrics import ServingMetrics, ServingResult
from labkit.engine.serving.request import RequestTimes
from labkit.engine.serving.server import NoServer, Server, find_server

__all__ = [
    "NoServer",
    "RequestTimes",
    "Server",
    "ServingMetrics",
    "ServingResult",
    "find_server",
    "measure_serving",
]
