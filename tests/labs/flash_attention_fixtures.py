"""Settings of the attention lab that take milliseconds, its bytes and FLOPs by hand, and results by hand."""

from collections.abc import Mapping

import torch

from labkit.labs._flash_attention_compute import FlashAttentionCompute
from labkit.labs._flash_attention_result import FlashAttentionParams, FlashAttentionResult, Found
from labkit.measure import Timing

CPU = torch.device("cpu")
LENGTHS = (32, 64, 128, 256)
HEADS, HEAD_DIM, BLOCK = 3, 64, 16


def params(seq_len: int = 128, **others: object) -> FlashAttentionParams:
    return FlashAttentionParams(seq_len, **({"head_dim": HEAD_DIM, "block_size": BLOCK, "causal": True} | others))


def run(compute: FlashAttentionCompute, *args: object, **others: object) -> list[FlashAttentionResult]:
    """Every result of one setting, in order."""
    return [s for s in compute(params(*args, **others), lambda: False) if isinstance(s, FlashAttentionResult)]


def output(seq_len: int, head_dim: int = HEAD_DIM) -> int:
    """Bytes of the output, and of the queries."""
    return HEADS * seq_len * head_dim * 4


def matrix(seq_len: int) -> int:
    """Bytes of the scores of all heads."""
    return HEADS * seq_len**2 * 4


def keys_read(seq_len: int, block: int, causal: bool) -> int:
    """Bytes of K and V that tiles of `block` read: each block of queries reads as many blocks of keys as it sees."""
    blocks = seq_len // block
    visits = blocks * (blocks + 1) // 2 if causal else blocks**2
    return HEADS * visits * block * 2 * HEAD_DIM * 4


def found(seconds: float, peak_bytes: int = 1000) -> Found:
    return Found(Timing(seconds, seconds, seconds, 5), peak_bytes)


def by_hand(times: Mapping[int, tuple[float, float, float]], **others: object) -> FlashAttentionResult:
    """A result at the longest of these lengths; seconds of standard, native and own at each."""
    roles = ("standard", "native", "own")
    curve = {n: {role: found(s, n) for role, s in zip(roles, at, strict=True)} for n, at in times.items()}
    chosen = params(max(times), **others)
    return FlashAttentionResult(chosen, "cpu", 10**9, found=curve[max(times)], curve=curve)
