"""What merging KV heads costs, and what gets it back: by the mean, by calibration, keys and values apart, healed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from labkit import _check
from labkit._progress import say
from labkit.attention.healing import heal
from labkit.attention.merging import PARTS, MergeReport, merge_kv_heads_
from labkit.attention.recorded import Healing, HealingPoint, MergeResult, MergeStudy
from labkit.corpora import load_text, token_batches
from labkit.models import DEFAULT_MODEL, LoadedModel, load_model, shared_copy
from labkit.quality import compare_models, perplexity

TEXT, OTHER_TEXT = "pydoc", "python-source"


@dataclass(frozen=True)
class _Bench:
    """The original, and the texts on which merged models are held against it."""

    original: LoadedModel
    windows: Tensor
    other: Tensor
    seq_len: int
    progress: bool

    def result(self, model: PreTrainedModel, report: MergeReport, method: str, seconds: float) -> MergeResult:
        here = compare_models(self.original, model, self.windows, self.seq_len)
        there = compare_models(self.original, model, self.other, self.seq_len)
        made = MergeResult(
            method=method,
            merge=report.merge,
            perplexity=here.perplexity,
            loss_rise=here.loss_rise,
            kl=here.kl,
            top1=here.top1,
            kl_other=there.kl,
            bytes_per_token=report.bytes_per_token,
            seconds=seconds,
        )
        if self.progress:
            say(
                f"{method}, {made.merge}: perplexity {made.perplexity:.2f}, {made.loss_rise:+.2f} nats, {seconds:.0f} s"
            )
        return made


def merge_study(
    name: str = DEFAULT_MODEL,
    num_key_value_heads: int = 1,
    *,
    n_samples: int = 8,
    seq_len: int = 512,
    fit_steps: int = 24,
    eval_windows: int = 4,
    other_windows: int = 1,
    heal_from: Sequence[str] = ("mean", "calibrated"),
    heal_samples: int = 64,
    heal_steps: int = 40,
    heal_time_limit_s: float | None = None,
    learning_rate: float = 3e-5,
    n_points: int = 5,
    progress: bool = True,
) -> MergeStudy:
    """Merge a model in each way, and heal those of `heal_from` by distillation from the original.

    The calibration's samples and the healing's are windows of "pydoc"; the evaluation's are others of it, and
    `other_windows` of "python-source". Takes minutes; `recorded_merge_study()` is what it once gave. Errors: those of
    `merge_kv_heads_` and `heal`, ValueError for a method in heal_from that is none.
    """
    for method in heal_from:
        _check.choice("heal_from", method, ("mean", "calibrated", "fitted"))
    loaded = load_model(name, dtype=torch.float32)
    before, bench = (
        loaded.model.config.num_key_value_heads,
        _bench(loaded, eval_windows, other_windows, seq_len, progress),
    )
    ids, more = (_samples(loaded, n, seq_len, seed) for n, seed in ((n_samples, 0), (heal_samples, 1)))
    merged = _merged(bench, num_key_value_heads, ids, fit_steps)
    results, healings = [result for *_, result in merged], []
    for model, report, start in [entry for entry in merged if entry[1].merge == "both"]:
        if start.method in heal_from:
            healing = _healed(bench, model, start.method, more, heal_steps, learning_rate, heal_time_limit_s, n_points)
            method, seconds = f"{start.method}, healed", start.seconds + healing.seconds
            results.append(bench.result(model, report, method, seconds))
            healings.append(healing)
    return MergeStudy(
        model=name,
        num_key_value_heads_before=before,
        num_key_value_heads=num_key_value_heads,
        text=TEXT,
        other_text=OTHER_TEXT,
        seq_len=seq_len,
        eval_windows=eval_windows,
        n_samples=n_samples,
        fit_steps=fit_steps,
        baseline=perplexity(loaded, bench.windows, seq_len),
        bytes_per_token_before=merged[0][1].bytes_per_token_before,
        results=tuple(results),
        healings=tuple(healings),
    )


def _merged(
    bench: _Bench, num_key_value_heads: int, ids: Tensor, fit_steps: int
) -> list[tuple[PreTrainedModel, MergeReport, MergeResult]]:
    """A model for each way of merging, measured."""
    made = []
    for method, options, merges in (
        ("mean", {}, tuple(PARTS)),
        ("calibrated", {"calibration": ids}, tuple(PARTS)),
        ("fitted", {"calibration": ids, "fit_steps": fit_steps}, ("both",)),
    ):
        for merge in merges:
            model = shared_copy(bench.original.model)
            report = merge_kv_heads_(model, num_key_value_heads, merge=merge, progress=bench.progress, **options)
            made.append((model, report, bench.result(model, report, method, report.seconds)))
    return made


def _bench(loaded: LoadedModel, windows: int, other_windows: int, seq_len: int, progress: bool) -> _Bench:
    texts = ((TEXT, windows), (OTHER_TEXT, other_windows))
    here, there = (_windows(loaded, name, count, seq_len) for name, count in texts)
    return _Bench(loaded, here, there, seq_len, progress)


def _samples(loaded: LoadedModel, count: int, seq_len: int, seed: int) -> Tensor:
    return token_batches(loaded.tokenizer, load_text(TEXT, "calibration"), count, seq_len, seed)


def _windows(loaded: LoadedModel, name: str, count: int, seq_len: int) -> Tensor:
    """The first `count` windows of a text's evaluation part, `(count * seq_len,)`."""
    ids = loaded.tokenizer(load_text(name, "eval"), return_tensors="pt", verbose=False).input_ids[0]
    takes = f"at most the {len(ids) // seq_len} windows of {seq_len} tokens that {name} holds"
    _check.require(0 < count * seq_len <= len(ids), "eval_windows", count, takes)
    return ids[: count * seq_len]


def _healed(
    bench: _Bench,
    model: PreTrainedModel,
    start: str,
    ids: Tensor,
    steps: int,
    learning_rate: float,
    time_limit_s: float | None,
    n_points: int,
) -> Healing:
    """Heal in place, with the perplexity at `n_points` steps, the first and the last among them."""
    at = {round(steps * i / max(1, n_points - 1)) for i in range(n_points)} | {0}
    seen: list[tuple[int, float, float]] = []
    begin, apart = time.perf_counter(), 0.0

    def watch(step: int) -> None:
        nonlocal apart
        now = time.perf_counter()
        if step in at:
            seen.append((step, perplexity(model, bench.windows, bench.seq_len), now - begin - apart))
        apart += time.perf_counter() - now

    report = heal(
        model,
        ids,
        teacher=bench.original,
        steps=steps,
        learning_rate=learning_rate,
        time_limit_s=time_limit_s,
        compute_dtype="bfloat16",
        watch=watch,
        progress=bench.progress,
    )
    done = len(report.losses)
    if done not in [step for step, *_ in seen]:  # the time limit came between two points
        seen.append((done, perplexity(model, bench.windows, bench.seq_len), report.seconds))
    points = tuple(
        HealingPoint(step, report.losses[step - 1] if step else None, value, seconds) for step, value, seconds in seen
    )
    return Healing(start, points, report.losses, report.seconds, learning_rate)
