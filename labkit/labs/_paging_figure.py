"""How `paging_lab` draws a result: empty memory and requests over time, empty memory by block size, and blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType
from plotly.subplots import make_subplots

from labkit.labs._figures import COLOURS, INK, MUTED, TEMPLATE, log_range
from labkit.labs._paging_blocks import add_blocks, draw_blocks
from labkit.labs._paging_forms import prefix, reserved_slots, setting
from labkit.labs._paging_result import BLOCK_SIZES, SHARED_PREFIXES, PagingResult, Replay
from labkit.labs._quantization_forms import share

Traces = Mapping[str, BaseTraceType]
# The share that Kwon et al. (2023) leave empty at most; nothing can be drawn at 0 on a logarithmic axis.
CLAIM, FLOOR = 0.04, 0.001
SYMBOLS = dict(zip(SHARED_PREFIXES, ("circle", "square", "diamond"), strict=True))
_HOVER = "%{hovertext}<extra></extra>"
_SIZES = (0.7, 370)
_LONGER = 1.3  # times what paging takes: as much of a longer replay in reserved memory is drawn
_WAYS = ("paged", "reserved")


def build_figure() -> go.Figure:
    """The empty figure: three panels above, the pool's first blocks below."""
    titles = ("Empty share over time", "Requests at once", "Empty share by block size", " ")
    figure = make_subplots(
        rows=2,
        cols=3,
        specs=[[{}, {}, {}], [{"colspan": 3}, None, None]],
        row_heights=[0.54, 0.46],
        horizontal_spacing=0.075,
        vertical_spacing=0.16,
        subplot_titles=titles,
    )
    _add_time(figure)
    _add_sizes(figure)
    add_blocks(figure, row=2, col=1)
    _add_legend(figure)
    _lay_out(figure)
    return figure


def _colour(way: str) -> str:
    return COLOURS[f"{way} KV"]


def _add_time(figure: go.Figure) -> None:
    look = {"mode": "lines", "showlegend": False, "hovertemplate": _HOVER}
    for way in _WAYS:
        figure.add_scatter(name=f"{way} waste", line={"width": 3, "color": _colour(way)}, **look, row=1, col=1)
        figure.add_scatter(name=f"{way} running", line={"width": 3, "color": _colour(way)}, **look, row=1, col=2)
        dots = {"width": 2, "color": _colour(way), "dash": "dot"}
        figure.add_scatter(name=f"{way} waiting", line=dots, **look, row=1, col=2)
    _add_claim(figure, col=1)


def _add_claim(figure: go.Figure, col: int) -> None:
    """The 4% line, which each panel of shares has."""
    line = {"mode": "lines", "line": {"width": 2, "color": COLOURS["ceiling"]}, "hoverinfo": "skip"}
    figure.add_scatter(name=f"claim {col}", y=[100 * CLAIM] * 2, **line, showlegend=False, row=1, col=col)


def _add_sizes(figure: go.Figure) -> None:
    where = {"row": 1, "col": 3, "showlegend": False}
    _add_claim(figure, col=3)
    figure["data"][-1].x = _SIZES
    for name, opacity in (("earlier reserved", 0.35), ("reserved by size", 1.0)):
        line = {"width": 3, "color": _colour("reserved")}
        figure.add_scatter(name=name, mode="lines", line=line, opacity=opacity, hovertemplate=_HOVER, **where)
    dash = {"width": 2, "color": MUTED, "dash": "dash"}
    figure.add_scatter(name="formula", mode="lines", line=dash, hoverinfo="skip", **where)
    faded = {"size": 12, "opacity": 0.5, "color": _colour("paged"), "line_width": 0}
    figure.add_scatter(name="earlier paged", mode="markers", marker=faded, hovertemplate=_HOVER, **where)
    marker = {"size": 16, "color": _colour("paged"), "line": {"width": 2, "color": INK}}
    look = {"mode": "markers+text", "textposition": "top center", "textfont": {"size": 14, "color": INK}}
    figure.add_scatter(name="paged by size", marker=marker, hovertemplate=_HOVER, **look, **where)


def _add_legend(figure: go.Figure) -> None:
    """Lines and points that are nowhere, so that the legend says what they stand for."""
    lines = {
        "paged": {"width": 3, "color": _colour("paged")},
        "reserved": {"width": 3, "color": _colour("reserved")},
        "waiting": {"width": 2, "color": MUTED, "dash": "dot"},
        f"{CLAIM:.0%} (claimed at most)": {"width": 2, "color": COLOURS["ceiling"]},
        "(block size - 1) / 2 / mean length": {"width": 2, "color": MUTED, "dash": "dash"},
    }
    for name, line in lines.items():
        figure.add_scatter(name=name, x=[None], y=[None], mode="lines", line=line, row=1, col=1)
    for count, symbol in SYMBOLS.items():
        name = f"system prompt {count:,}" if count else "no system prompt"
        marker = {"size": 11, "symbol": symbol, "color": _colour("paged")}
        figure.add_scatter(name=name, x=[None], y=[None], mode="markers", marker=marker, row=1, col=1)


def _lay_out(figure: go.Figure) -> None:
    figure.update_layout(template=TEMPLATE, height=710, margin={"l": 70, "r": 15, "t": 40, "b": 85}, barmode="overlay")
    figure.update_annotations(font_size=16)
    for col in (1, 2):
        figure.update_xaxes(title={"text": "Seconds into the replay", "standoff": 4}, row=1, col=col)
    shown = {"tickvals": [100 * FLOOR, 1, 4, 10, 100], "ticktext": [f"≤{FLOOR:.1%}", "1%", "4%", "10%", "100%"]}
    for col in (1, 3):
        figure.update_yaxes(type="log", range=log_range(90 * FLOOR, 150), **shown, row=1, col=col)
    ticks = {"tickvals": BLOCK_SIZES, "ticktext": [f"{size}" for size in BLOCK_SIZES], "tickangle": 0}
    title = {"text": "Tokens a block", "standoff": 4}
    figure.update_xaxes(title=title, type="log", range=log_range(*_SIZES), **ticks, row=1, col=3)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)


def draw(figure: go.Figure, result: PagingResult, earlier: Sequence[PagingResult]) -> None:
    """Set the traces' data; `earlier` results stay as faded points, a setting measured again as it came out last."""
    traces = {trace.name: trace for trace in figure.data}
    past = list({r.params: r for r in earlier}.values())
    _draw_time(figure, traces, result)
    _draw_sizes(traces, result, past)
    draw_blocks(figure, traces, result.tables)


def _percent(waste: float) -> float:
    """Where a share stands on the logarithmic axis."""
    return 100 * max(waste, FLOOR)


def _draw_time(figure: go.Figure, traces: Traces, result: PagingResult) -> None:
    end = _LONGER * result.paged.finished_s
    names = {"paged": f"blocks of {result.params.block_size}", "reserved": reserved_slots(result.params)}
    for way, replay in (("paged", result.paged), ("reserved", result.reserved)):
        for kind, (x, y, hover) in _series(replay, end, names[way]).items():
            traces[f"{way} {kind}"].update(x=x, y=y, hovertext=hover)
    traces["claim 1"].x = [0, end]
    for axis in ("xaxis", "xaxis2"):
        figure.layout[axis].range = [0, end]


def _series(replay: Replay, end: float, name: str) -> dict[str, tuple[list, list, list]]:
    """Points and hover texts of each line, up to `end` seconds."""
    samples = [sample for sample in replay.samples if sample.time_s <= end]
    held = [sample for sample in samples if sample.slots_allocated]
    x, hover = [s.time_s for s in samples], []
    for s in samples:
        now = f"<b>{name}</b>, {s.time_s:g} s<br>{s.running} running, {s.waiting} waiting"
        hover.append(f"{now}<br>{s.tokens_held:,} tokens in {s.slots_allocated:,} slots: {share(s.waste)} empty")
    said = dict(zip(x, hover, strict=True))
    return {
        "waste": ([s.time_s for s in held], [_percent(s.waste) for s in held], [said[s.time_s] for s in held]),
        "running": (x, [s.running for s in samples], hover),
        "waiting": (x, [s.waiting for s in samples], hover),
    }


def _draw_sizes(traces: Traces, result: PagingResult, past: list[PagingResult]) -> None:
    for name, shown in (("earlier paged", past), ("paged by size", [result])):
        traces[name].update(
            x=[r.params.block_size for r in shown],
            y=[_percent(r.paged.waste) for r in shown],
            hovertext=[
                f"<b>Blocks of {r.params.block_size}, {prefix(r.params)}</b><br>{share(r.paged.waste)} empty; MEASURED"
                f"<br>{share(r.formula_waste)} by the formula; MODELLED"
                for r in shown
            ],
            marker_symbol=[SYMBOLS.get(r.params.shared_prefix, "circle") for r in shown],
        )
    traces["paged by size"].text = [f"{share(result.paged.waste)}"]
    # The formula's line rises to the right, and starts past the smallest size, left of which there is no room.
    side = "center" if result.params.block_size == BLOCK_SIZES[0] else "left"
    traces["paged by size"].textposition = f"top {side}"
    length = result.paged.mean_length or 1.0
    sizes = [size for size in BLOCK_SIZES if size > 1]
    traces["formula"].update(x=sizes, y=[_percent((size - 1) / 2 / length) for size in sizes])
    for name, shown in (("earlier reserved", past), ("reserved by size", [result])):
        line = [(r, x) for r in shown for x in (*_SIZES, None)]
        traces[name].update(
            x=[x for _, x in line],
            y=[_percent(r.reserved.waste) for r, _ in line],
            hovertext=[f"<b>{setting(r.params)}</b><br>{share(r.reserved.waste)} empty; MEASURED" for r, _ in line],
        )
