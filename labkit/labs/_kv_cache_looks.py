"""Shapes, colours, ticks and labels that the panels of `kv_cache_lab` share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from labkit._table import readable
from labkit.labs._figures import COLOURS, HALO, INK
from labkit.labs._kv_cache_result import FULL, KVCacheResult

Traces = Mapping[str, BaseTraceType]
# Shapes stand for KV heads, from most to fewest.
_SYMBOLS = ("diamond", "circle", "square", "triangle-up", "triangle-down", "pentagon", "hexagon", "star")


def symbol(count: int, options: Sequence[int]) -> str:
    """The shape of this number of KV heads, of those that the lab offers."""
    return _SYMBOLS[options.index(count) % len(_SYMBOLS)]


def colour(bits: int) -> str:
    """Of a cache in 16 bits, or of a quantized one."""
    return COLOURS["float" if bits == FULL else "quantized KV"]


def looks(results: Sequence[KVCacheResult], options: Sequence[int]) -> dict[str, list]:
    """Shape and colour of each result's point."""
    return {
        "marker_symbol": [symbol(r.params.num_key_value_heads, options) for r in results],
        "marker_color": [colour(r.params.bits) for r in results],
    }


def decades(low: float, high: float, unit: str) -> dict[str, object]:
    """A tick a power of ten, written out."""
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return {"tickvals": [10.0**p for p in powers], "ticktext": [readable(10.0**p, unit) for p in powers]}


def add_label(figure: go.Figure, name: str, axis: str) -> None:
    """Words of `name` that are not shown yet, for a panel: `axis` is "" for the first, "2" for the second."""
    font = {"size": 14, "color": INK, "shadow": HALO}
    look = {"showarrow": False, "yshift": 20, "bgcolor": "rgba(255,255,255,0.7)", "font": font}
    figure.add_annotation(name=name, text="", visible=False, xref=f"x{axis}", yref=f"y{axis}", **look)


def label(figure: go.Figure, name: str, x: float, y: float, text: str, side: str) -> None:
    """Put the words of `name` beside a point of a panel with two logarithmic axes, readable over lines; `side`, "left"
    or "right", is where they lie."""
    shift = {"xanchor": "right", "xshift": -10} if side == "left" else {"xanchor": "left", "xshift": 10}
    note = next(note for note in figure.layout.annotations if note.name == name)
    note.update(x=math.log10(x), y=math.log10(y), text=text, visible=True, **shift)
