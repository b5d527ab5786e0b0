"""The decode step captured as a CUDA graph: one launch in place of some hundreds.

A graph replays fixed addresses and shapes. The tokens and the first one's slot are therefore copied into fixed tensors,
and attention looks at a bucket of slots, those past each token masked; a bucket that fills up is captured anew. So is
each number of tokens: one while decoding, a few where a draft is verified.
"""

import functools

import torch

from labkit.engine.cache import StaticKVCache
from labkit.engine.step import StepOps, run_step
from labkit.kv_cache.interface import StepInput

# Attention reads whole buckets: at most 255 slots too many a step, and one capture every 256 tokens.
_BUCKET = 256
_WARMUP_STEPS = 2
# Tokens of a step that are worth a graph: beyond, the step is long enough for its launches not to matter.
MAX_TOKENS = 16

_Rotary = tuple[torch.Tensor, torch.Tensor]


def static_step(
    ops: StepOps, tokens: torch.Tensor, slot: torch.Tensor, cache: StaticKVCache, rotary: _Rotary, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `(batch, q_len, vocab)` and hidden states of the chain `tokens (batch, q_len)` that begins at `slot (1,)`,
    with shapes that do not depend on the slot's value: attention looks at the first `kv_len` slots and masks those
    after each token.
    """
    slots = slot + torch.arange(tokens.shape[1], device=slot.device)
    mask = torch.arange(kv_len, device=slot.device)[None] <= slots[:, None]
    cos, sin = (table.index_select(0, slots) for table in rotary)
    return run_step(ops, tokens, StepInput(slots, cos, sin, kv_len, mask, False), cache)


class _Graph:
    """One captured step of `q_len` tokens over the first `kv_len` slots."""

    def __init__(
        self,
        ops: StepOps,
        cache: StaticKVCache,
        rotary: _Rotary,
        q_len: int,
        kv_len: int,
        pool: tuple[int, int] | None,
    ) -> None:
        device = cache.keys.device
        self.tokens = torch.zeros(cache.batch, q_len, dtype=torch.int64, device=device)
        self.slot = torch.full((1,), cache.length, dtype=torch.int64, device=device)
        step = functools.partial(static_step, ops, self.tokens, self.slot, cache, rotary, kv_len)
        # What the warm-up writes goes to the slots of the tokens that come next, and is overwritten by them.
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_STEPS):
                step()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits, self.hidden = step()


class DecodeGraphs:
    """Graphs of one cache by number of tokens and bucket, made when first needed, sharing one memory pool."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def clear(self) -> None:
        """Forget all graphs: the cache they wrote to is gone."""
        self._graphs.clear()

    def run(
        self,
        ops: StepOps,
        tokens: torch.Tensor,
        cache: StaticKVCache,
        rotary: _Rotary,
        *,
        logits_to_keep: int | None,
        return_hidden: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the last `logits_to_keep` (None: of all) of `tokens (batch, q_len)` at the cache's end, and their
        hidden states `(batch, q_len, hidden_size)` where asked for. Rows have one length."""
        q_len = tokens.shape[1]
        kv_len = min(-(-(cache.length + q_len) // _BUCKET) * _BUCKET, cache.max_length)
        if (q_len, kv_len) not in self._graphs:
            pool = next((g.graph.pool() for g in self._graphs.values()), None)
            self._graphs[q_len, kv_len] = _Graph(ops, cache, rotary, q_len, kv_len, pool)
        captured = self._graphs[q_len, kv_len]
        captured.tokens.copy_(tokens)
        captured.slot.fill_(cache.length)
        captured.graph.replay()
        # The graph writes the next step's results to the same place; the caller may still hold these. It makes the
        # logits of all tokens, since what takes the time is to read the head's weights once.
        logits = captured.logits[:, -(logits_to_keep or q_len) :].clone()
        return logits, captured.hidden.clone() if return_hidden else None
