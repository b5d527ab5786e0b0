"""The forms in which an eviction result leaves the lab: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._quantization_forms import plain, share
from labkit.labs._result import Number, si
from labkit.measure import Label, Measurement

if TYPE_CHECKING:
    from labkit.labs._eviction_result import EvictionParams, EvictionResult, Kept

NAMES = {
    "full": "all tokens",
    "window": "window",
    "sinks": "sinks + window",
    "heavy_hitters": "heavy hitters",
    "snapkv": "SnapKV",
}
SINKS = 4
_HOW = {
    "full": "nothing is forgotten",
    "window": "the latest",
    "sinks": f"the first {SINKS} and the latest",
    "heavy_hitters": "the latest half, and what all have looked at",
    "snapkv": "what the last 8 look at",
}
# The text form draws the prompt this wide; from tokens that no head holds to those that all do.
_COLUMNS, _SHADES = 64, " .:+#"


def budget_text(budget: float) -> str:
    """A share as a slider says it: "25%", "12.5%", "6.25%"."""
    return f"{100 * budget:g}%"


def setting(params: EvictionParams) -> str:
    """As a learner says it."""
    name = NAMES[params.method]
    return name if params.method == "full" else f"{name}, {budget_text(params.budget)}"


def numbers(result: EvictionResult) -> list[Number]:
    """The figures above the figure, what is not there yet left out."""
    return [*_size_numbers(result), *_needle_numbers(result), *_quality_numbers(result)]


def _size_numbers(result: EvictionResult) -> list[Number]:
    k, group = result.kept, "The cache after the prompt"
    agrees = "as its formula says" if k.predicted == k.nbytes else f"its formula: {k.nbytes - k.predicted:+,} B off"
    whole = f"which take {si(k.full_bytes, 'B')} (MODELLED)"
    beside = {"sinks": "the sinks' keys again", "heavy_hitters": "scores, positions", "snapkv": "positions"}
    kinds = beside.get(result.params.method, "nothing but keys and values")
    seen = len(k.tokens)
    return [
        Number("cache_bytes", "bytes", si(k.nbytes, "B"), k.nbytes, group, f"MEASURED; {agrees}"),
        Number("bytes_ratio", "of all tokens", f"{k.ratio:.1%}", k.ratio, group, whole),
        Number("bookkeeping", "beside K and V", si(k.bookkeeping, "B"), k.bookkeeping, group, kinds),
        Number("held", "tokens a KV head", f"{k.held} of {seen}", k.held, group, _HOW[result.params.method]),
    ]


def _needle_numbers(result: EvictionResult) -> list[Number]:
    k, group = result.kept, "The needle"
    where = f"of its {len(k.digits)} tokens, over layers and KV heads"
    digits = k.share(k.digits)
    verdict = "found" if k.found else f"missed: it is {k.answer}"
    shown = [
        Number("digits_kept", "number kept", share(digits), digits, group, where),
        Number("said", "the model says", _short(k.said), float(k.found), group, verdict),
    ]
    rows = (
        ("needles_found", "needles found", result.needles),
        ("full_needles", "with all tokens", result.full_needles),
    )
    for key, label, needles in rows:
        if needles:
            note = "prompts; MEASURED" if needles.firm else f"prompts so far, of {needles.of}; MEASURED"
            counted = f"{needles.count} of {needles.tried}"
            shown.append(Number(key, label, counted, needles.count, group, note))
    return shown


def _short(said: str) -> str:
    """A few words of whatever the model said, on one line."""
    words = " ".join(said.split())
    return f"“{words if len(words) <= 16 else words[:15] + '…'}”"


def _quality_numbers(result: EvictionResult) -> list[Number]:
    q, group = result.quality, "Perplexity"
    if q is None:
        return []
    after = f", each after {q.prompt_length} of its prompt" if q.prompt_length else ""
    over = f"{q.scored} of {q.of} tokens of pydoc{after}; MEASURED"
    return [
        Number("perplexity", NAMES[result.params.method], plain(q.perplexity), q.perplexity, group, over),
        Number("full_perplexity", "with all tokens", plain(q.baseline), q.baseline, group, "the same tokens"),
        Number("perplexity_ratio", "times that", f"{q.ratio:.3g}x", q.ratio, group, f"windows of {q.context_length}"),
    ]


def text(result: EvictionResult) -> str:
    """The whole result for a reader without widgets: numbers, what was kept of the prompt, needle by needle."""
    lines = [f"eviction_lab: {result.params.model}, {setting(result.params)} (needle at {result.params.depth:g})"]
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<20} {number.text:>16}  {number.note}".rstrip())
    return "\n".join([*lines, "", *_strip(result.kept), *_by_depth(result)])


def _strip(kept: Kept) -> list[str]:
    """The prompt from left to right: how many of layers and KV heads hold it, and what stands where."""
    seen = len(kept.tokens)
    size = math.ceil(seen / _COLUMNS)
    most = len(kept.heads) * kept.num_key_value_heads
    by_token = [sum(layer[i] for layer in kept.heads) / most for i in range(seen)]
    starts = range(0, seen, size)
    shares = [by_token[start : start + size] for start in starts]
    shades = "".join(_SHADES[math.ceil(sum(part) / len(part) * (len(_SHADES) - 1) - 1e-9)] for part in shares)
    marks = "".join(_mark(kept, range(start, start + size)) for start in starts)
    legend = f"{size} tokens a sign; held by none ' ', up to a quarter '.', half ':', three quarters '+', more '#'"
    return [f"What is kept of the prompt ({legend})", f"  |{shades}|", f"  |{marks}|  s sinks, N needle, Q question"]


def _mark(kept: Kept, tokens: range) -> str:
    for sign, start, end in (
        ("N", kept.needle.start, kept.needle.end),
        ("Q", kept.question.start, kept.question.end),
        ("s", 0, SINKS),
    ):
        if tokens.start < end and start < tokens.stop:
            return sign
    return " "


def _by_depth(result: EvictionResult) -> list[str]:
    if result.needles is None:
        return []
    lines = ["", "Needles found by depth"]
    for depth in sorted(set(result.depths)):
        hits = [hit for hit, at in zip(result.needles.found, result.depths, strict=False) if at == depth]
        lines.append(f"  {depth:<6g} {sum(hits)} of {len(hits)}")
    return lines


def rows(result: EvictionResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, value, unit, label."""
    common = asdict(result.params)
    return [
        common
        | {"quantity": m.name.removeprefix("eviction_lab."), "value": m.value, "unit": m.unit, "label": str(m.label)}
        for m in measurements(result)
    ]


def measurements(result: EvictionResult) -> list[Measurement]:
    """The ledger's lines, each with the lab's parameters."""
    params, k, lines = asdict(result.params), result.kept, []

    def add(name: str, value: float, unit: str, **details: object) -> None:
        if math.isfinite(value):
            common = {"device": result.device, "params": params, "dtype": result.dtype}
            lines.append(Measurement.of(f"eviction_lab.{name}", value, unit, **(common | details)))

    prompt = {"shapes": {"prompt": [1, len(k.tokens)]}}
    add("cache_bytes", k.nbytes, "bytes", **prompt)
    add("full_bytes", k.full_bytes, "bytes", label=Label.MODELLED, **prompt)
    add("held", k.held, "tokens", **prompt)
    add("needle_kept", k.share(k.needle), "fraction", **prompt)
    add("digits_kept", k.share(k.digits), "fraction", **prompt)
    add("said_right", float(k.found), "", **prompt)
    for name, needles in (("needles_found", result.needles), ("full_needles", result.full_needles)):
        if needles:
            add(name, needles.count, "prompts", shapes={"prompts": [needles.tried, needles.of]})
    if q := result.quality:
        scored = {"shapes": {"tokens": [q.scored, q.of], "window": [q.context_length, q.prompt_length]}}
        add("perplexity", q.perplexity, "", **scored)
        add("full_perplexity", q.baseline, "", **scored)
    return lines
