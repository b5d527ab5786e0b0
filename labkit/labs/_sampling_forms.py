"""The forms in which a result of the sampling lab leaves it: numbers, text, CSV rows, ledger lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from labkit.labs._result import Number, threads_text
from labkit.labs._speculative_forms import percent
from labkit.labs._speculative_tokens import visible
from labkit.measure import Label, Measurement

if TYPE_CHECKING:
    from labkit.labs._sampling_result import SamplingParams, SamplingResult

_NEXT = "The token after the prompt; MEASURED"
_TEXTS = "The texts; MEASURED"


def setting(params: SamplingParams) -> str:
    """As a learner says it."""
    k = f"top_k {params.top_k}" if params.top_k else "top_k off"
    p = f"top_p {params.top_p:g}" if params.top_p < 1 else "top_p off"
    return f"temperature {params.temperature:g}, {k}, {p}"


def drafting(params: SamplingParams) -> str:
    """Who drafts how much."""
    from labkit.labs._sampling_result import DRAFTED

    return f"{params.proposer}, {DRAFTED} drafted a call"


def numbers(result: SamplingResult) -> list[Number]:
    """The figures above the texts, what is not there yet left out."""
    return [*_next_numbers(result), *_text_numbers(result), *_acceptance_numbers(result)]


def _next_numbers(result: SamplingResult) -> list[Number]:
    said = result.next_token
    of = f"of {said.vocab_size:,}"
    cut = f"at this temperature: top_k {percent(said.cut_by_top_k)}, then top_p {percent(said.cut_by_top_p)}"
    own = f"the model's own: {said.own_bits:.2f}"
    return [
        Number("kept", "can be drawn", f"{said.kept:,}", said.kept, _NEXT, of),
        Number("entropy_bits", "entropy", f"{said.bits:.2f} bits", said.bits, _NEXT, own),
        Number("mass_cut", "probability cut", percent(said.mass_cut), said.mass_cut, _NEXT, cut),
    ]


def _text_numbers(result: SamplingResult) -> list[Number]:
    if not result.whole:
        return []
    count, tokens = len(result.texts), sum(len(text.tokens) for text in result.texts)
    alike = f"alike in their first {result.alike} token{'' if result.alike == 1 else 's'}"
    rows = [
        ("different_texts", "different texts", f"{result.different_texts} of {count}", result.different_texts, alike),
        ("distinct_share", "different tokens", percent(result.distinct_share), result.distinct_share, f"of {tokens}"),
    ]
    share = result.likeliest_share
    rows.append(("likeliest_share", "likeliest drawn", percent(share), share, "of the tokens; the others are marked"))
    return [Number(key, label, text, exact, _TEXTS, note) for key, label, text, exact, note in rows]


def _acceptance_numbers(result: SamplingResult) -> list[Number]:
    if result.alpha is None:
        return []
    group, stats = f"Speculation: {drafting(result.params)}; MEASURED", result.stats
    kept = f"± {percent(result.alpha_error)}: kept {stats.n_matches} of {stats.n_tested} that were tested"
    expected, made = result.expected_alpha, stats.tokens_per_target_call
    theory = "the mean over the same places; MODELLED"
    return [
        Number("acceptance_rate", "acceptance α", percent(result.alpha), result.alpha, group, kept),
        Number("expected_acceptance", "Σ min(p, q)", percent(expected), expected, group, theory),
        Number("tokens_per_target_call", "tokens a call", f"{made:.2f}", made, group, "the target's own included"),
    ]


def text(result: SamplingResult) -> str:
    """The whole result for a reader without widgets: numbers, the likeliest tokens, the texts."""
    where = f"{result.device}, {result.dtype}" + threads_text(result.threads)
    lines = [f"sampling_lab: {setting(result.params)}; {result.params.weights} weights, {where}"]
    lines.append(f"Prompt, {result.prompt_tokens} tokens: {result.prompt_text}")
    group = None
    for number in numbers(result):
        if number.group != group:
            lines += ["", group := number.group]
        lines.append(f"  {number.label:<16} {number.text:>12}  {number.note}".rstrip())
    lines += ["", "The likeliest next tokens: the model's own probability, and as drawn; MEASURED"]
    for one in result.next_token.likeliest:
        drawn = f"cut by {one.cut}" if one.cut.startswith("top") else percent(one.drawn)
        lines.append(f"  {visible(one.text):<16} {percent(one.own):>7}  {drawn:>18}")
    others = result.next_token.others
    lines.append(f"  {'all others':<16} {percent(others.own):>7}  {percent(others.drawn):>18}")
    for sampled in result.texts:
        lines += ["", f"Seed {sampled.seed}: {visible(''.join(sampled.pieces))}"]
    return "\n".join(lines)


def rows(result: SamplingResult) -> list[dict[str, object]]:
    """One row a figure: setting, quantity, value, unit, label; then the likeliest tokens; then the texts."""
    table = [
        m.params
        | {"quantity": m.name.removeprefix("sampling_lab."), "value": m.value, "unit": m.unit}
        | {"label": str(m.label)}
        for m in measurements(result)
    ]
    common, measured = asdict(result.params), {"label": str(Label.MEASURED)}
    for one in result.next_token.likeliest:
        for quantity, value in (("own_probability", one.own), ("probability", one.drawn)):
            what = {"quantity": quantity, "value": value, "unit": "fraction"}
            table.append(common | what | measured | {"text": one.text})
    for sampled in result.texts:
        what = {"quantity": f"text of seed {sampled.seed}", "value": len(sampled.tokens), "unit": "tokens"}
        table.append(common | what | measured | {"text": "".join(sampled.pieces)})
    return table


def measurements(result: SamplingResult) -> list[Measurement]:
    """The ledger's lines, with parameters: what was counted is MEASURED, sum min(p, q) is MODELLED."""
    said, stats = result.next_token, result.stats
    pairs = [
        ("kept", said.kept, "tokens"),
        ("entropy", said.bits, "bits"),
        ("mass_cut", said.mass_cut, "fraction"),
        ("different_texts", result.different_texts, "texts"),
        ("distinct_share", result.distinct_share, "fraction"),
        ("likeliest_share", result.likeliest_share, "fraction"),
        ("acceptance_rate", result.alpha, "fraction"),
        ("expected_acceptance", result.expected_alpha, "fraction"),
        ("tokens_per_target_call", stats.tokens_per_target_call if stats.n_row_calls else None, "tokens"),
    ]
    shapes = {"input_ids": [1, result.prompt_tokens]}
    common = {"device": result.device, "params": asdict(result.params), "shapes": shapes, "dtype": result.dtype}
    modelled = {"expected_acceptance": {"label": Label.MODELLED}}
    return [
        Measurement.of(f"sampling_lab.{name}", value, unit, **common, **modelled.get(name, {}))
        for name, value, unit in pairs
        if value is not None
    ]
