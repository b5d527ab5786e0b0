"""Chapter 04: bytes moved, a step of the online softmax, attention over tiles, its backward pass, a kernel to mend."""

from labkit.exercises import _ch04_backward, _ch04_fixed, _ch04_softmax, _ch04_tiles, _ch04_traffic
from labkit.exercises._exercise import Exercise

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    _ch04_traffic.ATTENTION_TRAFFIC,
    _ch04_softmax.ONLINE_SOFTMAX,
    _ch04_tiles.TILED_ATTENTION,
    _ch04_backward.BLOCK_BACKWARD,
    _ch04_fixed.FIXED_FLASH_ATTENTION,
)
