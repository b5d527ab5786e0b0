"""Chapter 03: a cache's bytes, heads merged into fewer, blocks allocated without a leak, cached attention to mend."""

from labkit.exercises import _ch03_attention, _ch03_blocks, _ch03_merge, _ch03_size
from labkit.exercises._exercise import Exercise

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    _ch03_size.CACHE_SIZE,
    _ch03_merge.MERGE_HEADS,
    _ch03_blocks.BLOCK_ALLOCATOR,
    _ch03_attention.FIXED_ATTENTION,
)
