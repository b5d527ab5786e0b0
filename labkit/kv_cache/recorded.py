"""What takes minutes to measure of a KV cache, as this project recorded it: `data/recorded/kv_cache.json`."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from labkit._paths import DATA
from labkit._table import Table
from labkit.kv_cache.generation import Generation
from labkit.measure import Label, Measurement

RECORDED = DATA / "recorded" / "kv_cache.json"


@dataclass(frozen=True)
class CachedPerplexity:
    """Perplexity through one cache, `baseline` through one in full precision, over the same windows; and the bytes
    that the cache held at the end of a window in bfloat16, `full_bytes` those of a full one."""

    cache: str
    nbits: int
    q_group_size: int
    residual_length: int
    perplexity: float
    baseline: float
    nbytes: int
    full_bytes: int
    seconds: float

    @property
    def loss(self) -> float:
        """Perplexity added, as a part of the baseline."""
        return self.perplexity / self.baseline - 1

    @property
    def share(self) -> float:
        """Bytes over those in bfloat16."""
        return self.nbytes / self.full_bytes


@dataclass(frozen=True)
class Evicted:
    """What a method kept with a share `budget` of the tokens.

    perplexity: over windows of `context_length` tokens, read in chunks, or, with a `prompt_length`, of what follows so
    long a prompt; None where it was not measured. found of `hidden` needles, in texts of `needle_length` tokens; 0 of 0
    where none were hidden.
    """

    method: str
    budget: float
    context_length: int
    prompt_length: int
    perplexity: float | None
    needle_length: int
    found: int
    hidden: int


@dataclass(frozen=True)
class RecordedKV:
    """All that was recorded, and where."""

    model: str
    machine: str
    date: str
    commit: str
    evaluation: str
    generation: tuple[Generation, ...]
    quantized: tuple[CachedPerplexity, ...]
    evicted: tuple[Evicted, ...]

    def one(self, cache: str, nbits: int, residual_length: int = 32) -> CachedPerplexity:
        """The run of one setting. Errors: LookupError where it was not recorded."""
        asked = (cache, nbits, residual_length)
        for run in self.quantized:
            if (run.cache, run.nbits, run.residual_length) == asked:
                return run
        raise LookupError(f"no recorded run of {asked}")

    def kept_by(self, method: str, budget: float, *, prompt_length: int = 0) -> Evicted:
        """The run of one eviction method. Errors: LookupError where it was not recorded."""
        asked = (method, budget, prompt_length)
        for run in self.evicted:
            if (run.method, run.budget, run.prompt_length) == asked:
                return run
        raise LookupError(f"no recorded run of {asked}")

    def measurement(self, name: str, value: float, unit: str, **params: object) -> Measurement:
        """One of these figures as a Measurement, labelled RECORDED."""
        params = {"model": self.model, "date": self.date, "commit": self.commit} | params
        return Measurement(name, value, unit, label=Label.RECORDED, device=self.machine, params=params)


@functools.cache
def recorded_kv(path: Path = RECORDED) -> RecordedKV:
    """What was recorded. Errors: FileNotFoundError where nothing was."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = {"generation": Generation, "quantized": CachedPerplexity, "evicted": Evicted}
    return RecordedKV(**found | {name: tuple(row(**r) for r in found[name]) for name, row in rows.items()})


def quantized_table(recorded: RecordedKV) -> Table:
    """A row a quantized cache: what it lost, and what it weighs."""
    rows = tuple(
        (
            run.cache,
            str(run.nbits) if run.nbits else "",
            str(run.q_group_size) if run.q_group_size else "",
            str(run.residual_length) if run.nbits else "",
            f"{run.perplexity:.3f}",
            f"{run.loss:+.2%}",
            f"{run.share:.3f}",
        )
        for run in recorded.quantized
    )
    return Table(("cache", "bits", "group", "recent", "perplexity", "loss", "of bfloat16's bytes"), rows)


def generation_table(recorded: RecordedKV) -> Table:
    """A row a length: seconds with a cache and without."""
    rows = tuple(
        (str(run.new_tokens), f"{run.with_cache_s:.2f} s", f"{run.without_cache_s:.2f} s", f"{run.ratio:.1f}x")
        for run in recorded.generation
    )
    return Table(("new tokens", "with a cache", "without", "ratio"), rows)


def evicted_table(recorded: RecordedKV) -> Table:
    """A row a method and budget: perplexity, and needles found."""
    rows = tuple(
        (
            run.method,
            f"{run.budget:.0%}",
            "" if run.perplexity is None or run.prompt_length else f"{run.perplexity:.1f}",
            "" if run.perplexity is None or not run.prompt_length else f"{run.perplexity:.1f}",
            f"{run.found} of {run.hidden}, {run.needle_length} tokens" if run.hidden else "",
        )
        for run in recorded.evicted
    )
    return Table(("method", "tokens held", "perplexity", "after a prompt", "needles found"), rows)
