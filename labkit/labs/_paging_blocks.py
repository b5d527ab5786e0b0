"""How `paging_lab` draws a pool: one cell a block, filled as far as it holds tokens, in its sequence's colour."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

from labkit.kv_cache.blocks import Snapshot
from labkit.labs._figures import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, SILVER, SKY, VERMILLION, YELLOW
from labkit.labs._paging_result import TABLES_AT_S, Block, first_blocks

COLUMNS, ROWS = 32, 8
_HIGH, _WIDE = 0.86, 0.92
_HOVER = "%{hovertext}<extra></extra>"


def _tint(colour: str, strength: float) -> str:
    """The colour on white, so that a number on it can be read."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)


# The number in each cell says which sequence it is; colours come round again where there are more.
_BASE = (SKY, ORANGE, GREEN, PURPLE, YELLOW, BLUE, VERMILLION)
TINTS = tuple(_tint(colour, strength) for strength in (0.75, 0.4) for colour in _BASE)
SHARED = SILVER


def add_blocks(figure: go.Figure, *, row: int, col: int) -> None:
    """The traces and the axes of the grid."""
    where = {"row": row, "col": col, "showlegend": False}
    look = {"width": _WIDE, "hovertemplate": _HOVER}
    figure.add_bar(name="frames", marker={"color": "white", "line": {"width": 1}}, **look, **where)
    figure.add_bar(name="fills", marker={"line": {"width": 0}}, **look, **where)
    # A block's colour lies under its number, and no line: no halo.
    font = {"size": 12, "color": INK, "shadow": "none"}
    numbers = {"mode": "text", "textfont": font, "hoverinfo": "skip"}
    figure.add_scatter(name="sequences", **numbers, **where)
    figure.layout.annotations[-1].name = "blocks"
    bare = {"showgrid": False, "ticks": "", "showline": False}
    figure.update_xaxes(range=[-0.6, COLUMNS - 0.4], showticklabels=False, **bare, row=row, col=col)
    labels = {"tickvals": [r + 0.5 for r in range(ROWS)], "ticktext": [f"{COLUMNS * r}" for r in range(ROWS)]}
    title = {"text": "Block", "standoff": 4}
    figure.update_yaxes(range=[ROWS + 0.05, -0.05], title=title, **labels, **bare, row=row, col=col)


def draw_blocks(figure: go.Figure, traces: Mapping[str, BaseTraceType], snapshot: Snapshot | None) -> None:
    """The pool's first blocks at one moment; none where there is no moment yet."""
    blocks = first_blocks(snapshot, COLUMNS * ROWS) if snapshot else ()
    used = [block for block in blocks if block.sequences]
    colours = _colours(used)
    hover = {block.number: _hover(block, snapshot.block_size) for block in blocks}
    line = [MUTED if block.sequences else GRID for block in blocks]
    traces["frames"].update(**_bars(blocks, 1.0), hovertext=list(hover.values()), marker_line_color=line)
    fills = [block.fill / snapshot.block_size for block in used]
    traces["fills"].update(
        **_bars(used, fills),
        hovertext=[hover[block.number] for block in used],
        marker_color=[colours[block.number] for block in used],
    )
    traces["sequences"].update(
        x=[block.number % COLUMNS for block in used],
        y=[block.number // COLUMNS + 0.5 for block in used],
        text=[f"<b>x{n}</b>" if (n := len(block.sequences)) > 1 else f"{block.sequences[0]}" for block in used],
    )
    if snapshot:
        figure.update_annotations(text=_title(snapshot, len(blocks)), selector={"name": "blocks"})


def _title(snapshot: Snapshot, shown: int) -> str:
    which = f"Blocks 0 to {shown - 1} of {snapshot.num_blocks:,}"
    which = f"All {shown} blocks" if shown == snapshot.num_blocks else which
    shared = " Grey, xN: shared by N." if snapshot.shared else ""
    return (
        f"{which}, {TABLES_AT_S:g} s into the replay "
        f'<span style="font-size:13px">Number and colour: whose. Height: how full. Blank: free.{shared}</span>'
    )


def _colours(used: list[Block]) -> dict[int, str]:
    """By block: a tint a sequence, in the order in which they first appear; one of their own for shared blocks."""
    found: dict[int, str] = {}
    for block in used:
        if len(block.sequences) == 1:
            found.setdefault(block.sequences[0], TINTS[len(found) % len(TINTS)])
    return {b.number: found[b.sequences[0]] if len(b.sequences) == 1 else SHARED for b in used}


def _bars(blocks: tuple[Block, ...] | list[Block], filled: float | list[float]) -> dict[str, list]:
    """Bars that stand on the floor of their cells; the axis points down, so that block 0 is the first."""
    heights = [filled] * len(blocks) if isinstance(filled, float) else filled
    margin = (1 - _HIGH) / 2
    return {
        "x": [block.number % COLUMNS for block in blocks],
        "base": [block.number // COLUMNS + 1 - margin for block in blocks],
        "y": [-_HIGH * height for height in heights],
    }


def _hover(block: Block, block_size: int) -> str:
    name = f"<b>Block {block.number}</b><br>"
    if not block.sequences:
        return f"{name}free"
    filled = f"{block.fill} of {block_size} slots filled"
    if len(block.sequences) > 1:
        return f"{name}shared by {len(block.sequences)} sequences, number {block.place} in each table<br>{filled}"
    return f"{name}sequence {block.sequences[0]}, number {block.place} of its {block.of}<br>{filled}"
