"""KV caches: what they weigh, and the forms that weigh less or waste less."""

from labkit.kv_cache.blocks import BlockManager, OutOfBlocks
from labkit.kv_cache.heavy_hitters import HeavyHitterCache
from labkit.kv_cache.memory import cache_nbytes
from labkit.kv_cache.paged import PagedKVCache
from labkit.kv_cache.paged_quantized import PagedQuantizedCache
from labkit.kv_cache.paged_storage import paged_cache_bytes
from labkit.kv_cache.quantized import QuantizedCache
from labkit.kv_cache.quantized_blocks import paged_quantized_bytes
from labkit.kv_cache.sinks import SinkCache
from labkit.kv_cache.sizing import bits_per_value, bytes_per_token, quantized_cache_bytes
from labkit.kv_cache.snapkv import SnapKVCache

__all__ = [
    "BlockManager",
    "HeavyHitterCache",
    "OutOfBlocks",
    "PagedKVCache",
    "PagedQuantizedCache",
    "QuantizedCache",
    "SinkCache",
    "SnapKVCache",
    "bits_per_value",
    "bytes_per_token",
    "cache_nbytes",
    "paged_cache_bytes",
    "paged_quantized_bytes",
    "quantized_cache_bytes",
]
