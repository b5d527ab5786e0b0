"""Chapter 01: what a model weighs, how fast it decodes, where memory stops being the limit, a benchmark to mend."""

from labkit.exercises import _ch01_benchmark, _ch01_memory, _ch01_speed
from labkit.exercises._ch01_speed import measured_decode
from labkit.exercises._exercise import Exercise

__all__ = ["EXERCISES", "measured_decode"]

EXERCISES: tuple[Exercise, ...] = (
    _ch01_memory.MODEL_MEMORY,
    _ch01_speed.TOKENS_PER_SECOND,
    _ch01_speed.MEMORY_BOUND_BATCH,
    _ch01_benchmark.FIXED_BENCHMARK,
)
