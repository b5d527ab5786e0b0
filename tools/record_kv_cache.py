"""`make record-kv`: what chapter 03 shows as RECORDED of the cache itself, measured on this machine.

Writes `data/recorded/kv_cache.json` after each part. A quarter of an hour on two quiet cores; the caches of
`transformers` are measured where their backends are installed.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import Cache, DynamicCache

from labkit.corpora import load_text
from labkit.hardware import describe
from labkit.kv_cache import QuantizedCache
from labkit.kv_cache.evaluation import cached_perplexity
from labkit.kv_cache.eviction import EVICTION_METHODS, eviction_point
from labkit.kv_cache.generation import Generation, time_generation
from labkit.kv_cache.memory import cache_nbytes
from labkit.kv_cache.needle import find_needles, needle_prompts
from labkit.kv_cache.peers import quantized_peers
from labkit.kv_cache.recorded import RECORDED, CachedPerplexity, Evicted
from labkit.models import DEFAULT_MODEL, load_model
from tools.recording import machine, short_commit

WINDOWS, LENGTH, CHUNK = 2, 2048, 32
PROMPT, NEW_TOKENS = 16, (16, 32, 64, 128, 256)
# (nbits, q_group_size, residual_length)
SETTINGS = ((8, 32, 32), (4, 32, 32), (2, 32, 32), (4, 64, 32), (4, 32, 0), (2, 32, 128))
EVICTED_WINDOWS, EVICTED_LENGTH, NEEDLES, NEEDLE_LENGTH = 2, 1024, 30, 256
# A prompt that leaves 127 tokens to be scored through what was kept of it; the longest texts that hide a needle.
EVICTED_PROMPT, LONG_NEEDLE = 896, 512
BUDGETS = (0.25, 0.125)
PARTS = ("generation", "quantized", "evicted")


class Recorder:
    """The model, its text, and what was recorded so far."""

    def __init__(self) -> None:
        threads = describe("cpu").cores
        torch.set_num_threads(threads)
        self.provenance = machine(threads) | {"commit": short_commit()}
        self.loaded = load_model(device="cpu", dtype=torch.float32)
        ids = self.loaded.tokenizer(load_text("pydoc", "eval"), add_special_tokens=False, verbose=False).input_ids
        self.text = torch.tensor(ids)
        self.found = dict.fromkeys(PARTS, ())
        if RECORDED.exists():
            known = json.loads(RECORDED.read_text(encoding="utf-8"))
            self.found = {name: known[name] for name in PARTS}

    def write(self) -> None:
        """All parts so far."""
        common = {"model": DEFAULT_MODEL, "evaluation": f"{WINDOWS} x {LENGTH} tokens of pydoc, {CHUNK} a step"}
        RECORDED.write_text(json.dumps(common | self.provenance | self.found, indent=1) + "\n", encoding="utf-8")

    def generation(self) -> Iterator[Generation]:
        """With a cache and without, at each length."""
        for new in NEW_TOKENS:
            # Short ones again and again: a moment's load on the machine would show.
            yield time_generation(self.loaded, self.text[None, :PROMPT], new, repeats=max(1, 128 // new))

    def _perplexity(self, make: Callable[[], Cache]) -> float:
        return cached_perplexity(self.loaded, self.text[: WINDOWS * LENGTH], LENGTH, make, chunk=CHUNK)

    def _nbytes(self, half: torch.nn.Module, cache: Cache) -> int:
        """At the end of a window that went in as `cached_perplexity` puts it in."""
        ids = self.text[None, :LENGTH]
        with torch.no_grad():
            for start in range(0, LENGTH, CHUNK):
                half.model(input_ids=ids[:, start : start + CHUNK], past_key_values=cache)
        return cache_nbytes(cache)

    def quantized(self) -> Iterator[CachedPerplexity]:
        """This package's settings, then `transformers`' own caches."""
        config = self.loaded.model.config
        caches = [("labkit", s, lambda s=s: QuantizedCache(config, *s)) for s in SETTINGS]
        for nbits in (4, 2):
            for peer in quantized_peers(config, nbits)[1:]:
                if peer.make is None:
                    print(f"{peer.name}: {peer.why}", flush=True)
                elif "fp8" not in peer.name:
                    caches.append((peer.name, (nbits, 32, 32), peer.make))
                elif nbits == 4:
                    caches.append((peer.name, (8, 0, 0), peer.make))
        full = lambda: DynamicCache(config=config)  # noqa: E731
        baseline = self._perplexity(full)
        half = load_model(device="cpu", dtype=torch.bfloat16).model
        full_bytes = self._nbytes(half, full())
        for name, setting, make in caches:
            begin = time.perf_counter()
            value = self._perplexity(make)
            seconds = round(time.perf_counter() - begin, 1)
            nbytes = self._nbytes(half, make())
            yield CachedPerplexity(name, *setting, round(value, 4), round(baseline, 4), nbytes, full_bytes, seconds)

    def evicted(self) -> Iterator[Evicted]:
        """By method and budget: perplexity over a long text, and needles found; then what follows a long prompt, which
        is what SnapKV is for; then the needles of the longest texts, with everything kept."""
        settings = [("full", 1.0), *((m, b) for b in BUDGETS for m in EVICTION_METHODS if m != "full")]
        for method, budget in settings:
            yield self._point(method, budget, n_needles=NEEDLES)
        for method in ("full", "window", "heavy_hitters", "snapkv"):
            yield self._point(method, 1.0 if method == "full" else BUDGETS[0], prompt_length=EVICTED_PROMPT)
        prompts = needle_prompts(self.loaded, n=NEEDLES, context_length=LONG_NEEDLE)
        count = find_needles(self.loaded, prompts, DynamicCache)
        yield Evicted("full", 1.0, LONG_NEEDLE, 0, None, LONG_NEEDLE, count.found, count.tried)

    def _point(self, method: str, budget: float, *, prompt_length: int = 0, n_needles: int = 0) -> Evicted:
        options = {"context_length": EVICTED_LENGTH, "prompt_length": prompt_length, "n_needles": n_needles}
        text, tokenizer = self.text[: EVICTED_WINDOWS * EVICTED_LENGTH], self.loaded.tokenizer
        *_, point = eviction_point(self.loaded, tokenizer, method, budget, text, needle_length=NEEDLE_LENGTH, **options)
        value = None if point.perplexity is None else round(point.perplexity, 4)
        needles = (NEEDLE_LENGTH, point.needles_found, point.needles_tried)
        return Evicted(method, budget, EVICTED_LENGTH, prompt_length, value, *needles)


def main(argv: Sequence[str] | None = None) -> int:
    """Record the parts that are not recorded yet, or those asked for."""
    parser = argparse.ArgumentParser(prog="make record-kv", description=__doc__.splitlines()[0])
    parser.add_argument("--again", nargs="*", choices=PARTS, default=(), help="parts to measure anew")
    parser.add_argument("--only", choices=PARTS, help="this part alone")
    args = parser.parse_args(argv)
    recorder = Recorder()
    for part in (args.only,) if args.only else PARTS:
        if recorder.found[part] and part not in args.again:
            continue
        rows = []
        for row in getattr(recorder, part)():
            rows.append(dataclasses.asdict(row))
            print(rows[-1], flush=True)
        recorder.found[part] = rows
        recorder.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
