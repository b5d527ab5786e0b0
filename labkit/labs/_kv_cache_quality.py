"""The third panel of `kv_cache_lab`: perplexity through rounded caches, measured, beside merged heads, recorded."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from labkit.labs._figures import MUTED, log_range
from labkit.labs._kv_cache_forms import heads, plain, times
from labkit.labs._kv_cache_looks import Traces, looks, symbol
from labkit.labs._kv_cache_result import FULL, KVCacheResult

BEYOND = "triangle-up-open"
SMALLER = (0.85, 11.0)
# Perplexity over that of 16 bits: the axis unless a merge needs more, and the most that it holds.
_LEAST_TOP, _MOST_TOP = 1.3, 60.0
# The part of the axis that lies below 1, where the points have no room of their own.
_BELOW = 0.12
_NOTE = "recorded or not"


def draw_perplexity(
    figure: go.Figure, traces: Traces, result: KVCacheResult, past: list, options: Sequence[int]
) -> None:
    """Rounded caches, measured; merged heads, recorded, hollow. Each beside its own full precision."""
    # The perplexity does not hang on the length: one point for each number of bits.
    measured = list({r.params.bits: r for r in past if r.quality}.values())
    now = [result] if result.quality else []
    for trace, points in (("earlier perplexity", measured), ("perplexity", now)):
        traces[trace].update(
            x=[FULL / r.params.bits_per_value for r in points],
            y=[r.quality.ratio for r in points],
            hovertext=[_quality_hover(r) for r in points],
            **looks(points, options),
        )
    traces["perplexity"].update(text=[f"{plain(r.quality.perplexity)} " for r in now], textposition="top center")
    top = max([_LEAST_TOP, *(1.15 * r.quality.ratio for r in (*measured, *now))])
    merged = _merged_points(result)
    top = min(_MOST_TOP, max([top, *(1.6 * y for _, y, _, _ in merged)]))
    edge = top / 1.4
    traces["merged"].update(
        x=[x for x, _, _, _ in merged],
        y=[min(y, edge) for _, y, _, _ in merged],
        text=[f" {name} " for _, _, name, _ in merged],
        # Neighbours have their names on different sides.
        textposition=[f"middle {('left', 'right')[i % 2]}" for i in range(len(merged))],
        hovertext=[hover for _, _, _, hover in merged],
        marker_symbol=[
            BEYOND if y > edge else f"{symbol(result.params.num_key_value_heads, options)}-open"
            for _, y, _, _ in merged
        ],
    )
    _say_what_is_missing(figure, result)
    ticks = [1, 1.1, 1.2, 1.3] if top < 1.6 else [1, 2, 5, 10, 20, 50]
    shown = {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    figure.layout.yaxis3.update(range=log_range(top**-_BELOW, top), **shown)


def _quality_hover(result: KVCacheResult) -> str:
    quality = result.quality
    line = f"<b>{result.params.bits} bits, {result.params.bits_per_value:g} with scales</b><br>"
    return line + f"perplexity {plain(quality.perplexity)}, 16 bits {plain(quality.baseline)}; MEASURED"


def _merged_points(result: KVCacheResult) -> list[tuple[float, float, str, str]]:
    """Times smaller, perplexity over the original's, name and hover text of each merge of keys and values, the best
    one first."""
    study = result.merged
    if study is None:
        return []
    smaller = study.num_key_value_heads_before / study.num_key_value_heads
    return [
        (
            smaller,
            found.perplexity / study.baseline,
            f"{found.method}: {times(found.perplexity / study.baseline)}",
            f"<b>Heads merged: {found.method}</b><br>perplexity {plain(found.perplexity)}, before "
            f"{plain(study.baseline)}<br>RECORDED {study.provenance.get('date', '')}",
        )
        for found in sorted(study.results, key=lambda found: found.perplexity)
        if found.merge == "both"
    ]


def add_note(figure: go.Figure) -> None:
    """A line for where the heads are not the model's own, not shown yet."""
    place = {"xref": "x3 domain", "yref": "y3 domain", "x": 0.98, "y": 0.8, "xanchor": "right", "yanchor": "top"}
    figure.add_annotation(name=_NOTE, text="", visible=False, showarrow=False, font_color=MUTED, **place)


def _say_what_is_missing(figure: go.Figure, result: KVCacheResult) -> None:
    """That what is seen was recorded, or that nothing was."""
    count = heads(result.params.num_key_value_heads)
    words = "hollow: RECORDED" if result.merged else f"{count}: not recorded"
    note = next(note for note in figure.layout.annotations if note.name == _NOTE)
    note.update(text=words, visible=result.params.num_key_value_heads != result.own_heads)
