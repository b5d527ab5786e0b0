"""The decode step captured as a CUDA graph: one launch a token in place of some hundreds.

A graph replays fixed addresses and shapes. The token, its slot and its position are therefore copied into fixed
tensors, and attention looks at a bucket of slots, those past the end masked; a bucket that fills up is captured anew.
"""

import functools

import torch

from labkit.engine.cache import StaticKVCache
from labkit.engine.step import StepOps, run_step
from labkit.kv_cache.interface import StepInput

# Attention reads whole buckets: at most 255 slots too many a step, and one capture every 256 tokens.
_BUCKET = 256
_WARMUP_STEPS = 2


def static_step(
    ops: StepOps,
    tokens: torch.Tensor,
    slot: torch.Tensor,
    cache: StaticKVCache,
    rotary: tuple[torch.Tensor, torch.Tensor],
    kv_len: int,
) -> torch.Tensor:
    """Logits `(batch, 1, vocab)` of `tokens (batch, 1)` at `slot (1,)`, with shapes that do not depend on the slot's
    value: attention looks at the first `kv_len` slots and masks those after it.
    """
    mask = torch.arange(kv_len, device=slot.device)[None] <= slot[:, None]
    cos, sin = (table.index_select(0, slot) for table in rotary)
    return run_step(ops, tokens, StepInput(slot, cos, sin, kv_len, mask, False), cache)[0]


class _Graph:
    """One captured step over the first `kv_len` slots."""

    def __init__(
        self,
        ops: StepOps,
        cache: StaticKVCache,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_len: int,
        pool: tuple[int, int] | None,
    ) -> None:
        device = cache.keys.device
        self.tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        self.slot = torch.full((1,), cache.length, dtype=torch.int64, device=device)
        step = functools.partial(static_step, ops, self.tokens, self.slot, cache, rotary, kv_len)
        # What the warm-up writes goes to the slot of the token that comes next, and is overwritten by it.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_STEPS):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = step()


class DecodeGraphs:
    """Graphs of one cache by bucket, made when first needed, sharing one memory pool."""

    def __init__(self) -> None:
        self._graphs: dict[int, _Graph] = {}

    def clear(self) -> None:
        """Forget all graphs: the cache they wrote to is gone."""
        self._graphs.clear()

    def run(
        self,
        ops: StepOps,
        tokens: torch.Tensor,
        cache: StaticKVCache,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Logits `(batch, 1, vocab)` of `tokens (batch, 1)` at the cache's end."""
        kv_len = min(-(-(cache.length + 1) // _BUCKET) * _BUCKET, cache.max_length)
        if kv_len not in self._graphs:
            pool = next((g.graph.pool() for g in self._graphs.values()), None)
            self._graphs[kv_len] = _Graph(ops, cache, rotary, kv_len, pool)
        captured = self._graphs[kv_len]
        captured.tokens.copy_(tokens)
        captured.slot.fill_(cache.length)
        captured.graph.replay()
        # The graph writes the next step's logits to the same place; the caller may still hold these.
        return captured.logits.clone()
