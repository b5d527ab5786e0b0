"""How every figure of the course looks: one template, one colour a technique or op family, and its static picture."""

import logging
import math
import threading
from collections.abc import Sequence

import plotly.graph_objects as go

from labkit._compat import quiet_renderer

# Okabe and Ito's palette, which stays apart under the common kinds of colour blindness.
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
)
# From the text's own to what is hardly there.
INK, MUTED, PALE, SILVER, GRID, FAINT = "#1b1b1b", "#6b6b6b", "#9a9a9a", "#c4c4c4", "#e4e4e4", "#f3f3f3"
ERROR = "#a40000"
# Scales for heat maps: shares from none to all (3%, an even share of 32, is told from none), magnitudes (darker is
# more), and errors over decades.
SHARES = [[0, "#ffffff"], [0.03, "#dbe9f6"], [0.2, "#85bcdc"], [0.5, "#2b7bba"], [1, "#08306b"]]
MAGNITUDES, DECADES = "Blues", "Viridis"

# A colour stands for the same thing in every chapter; what is compared with it beside a colour also has its own shape,
# dash or place, so that no figure is read by colour alone.
COLOURS = {
    "MLP": ORANGE,
    "projections": BLUE,
    "attention": PURPLE,
    "LM head": GREEN,
    "elementwise": SKY,
    "other": MUTED,
    "ceiling": INK,
    "float": MUTED,
    "bfloat16": PALE,
    "int8": SKY,
    "int4": ORANGE,
    "RTN": SKY,
    "AWQ": GREEN,
    "GPTQ": VERMILLION,
    "QAT": PURPLE,
    "quantized KV": BLUE,
    "paged KV": GREEN,
    "reserved KV": VERMILLION,
    "window": SKY,
    "sinks + window": GREEN,
    "heavy hitters": ORANGE,
    "SnapKV": PURPLE,
    "standard attention": VERMILLION,
    "native attention": BLUE,
    "own attention": GREEN,
    "EAGLE head": PURPLE,
    "prompt lookup": SKY,
    "int4 copy": ORANGE,
    "draft": ORANGE,
    "verify": BLUE,
    "free drafts": GREEN,
    "folk claim": VERMILLION,
    # What became of a token: drafted and kept, drafted and refused, or the target's own.
    "accepted": BLUE,
    "rejected": VERMILLION,
    "untested": MUTED,
    "residual": ORANGE,
    "bonus": GREEN,
    "plain": MUTED,
    "prompt": MUTED,
    # The rungs of chapter 06's ladder, each in the colour that its technique has in its own chapter.
    "baseline": MUTED,
    "step": VERMILLION,
    "attention rung": GREEN,
    "speculation": PURPLE,
}
# What figures call a technique beside its own name.
_ALSO = {
    "16 bits": "bfloat16",
    "8 bits": "int8",
    "4 bits": "int4",
    "3 bits, trained": "QAT",
    "standard": "standard attention",
    "tiles": "own attention",
    "tiles in plain PyTorch": "own attention",
    "PyTorch's kernel": "native attention",
}


def technique(name: str) -> str | None:
    """The key of `COLOURS` that a line of this name stands for; what follows a comma says which form of it."""
    known = {key: key for key in COLOURS} | _ALSO
    return known.get(name) or known.get(name.split(", ")[0])


def line_looks(names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Of lines in one figure: colour, dash and symbol. A technique has its colour, and its second form is dotted with
    another symbol; what stands for no technique takes the palette's colours that are left, in order."""
    taken = [COLOURS[known] for name in names if (known := technique(name))]
    palette = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
    # More lines than colours: they come round again.
    left = [*(c for c in palette if c not in taken), *palette * len(names)]
    looks, seen = {}, []
    for name in names:
        colour = COLOURS[known] if (known := technique(name)) else left.pop(0)
        again = seen.count(colour) % len(_SYMBOLS)
        seen.append(colour)
        looks[name] = {"color": colour, "dash": "dot" if again else None, "symbol": _SYMBOLS[again]}
    return looks


_SYMBOLS = ("circle", "square", "diamond", "triangle-up")

# Around words: where a line or a mark lies under them, it does not strike them through.
HALO = ", ".join(f"{x}px {y}px 1px white" for x in (-1, 1) for y in (-1, 1)) + ", 0 0 3px white, 0 0 3px white"

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        font={"family": "Helvetica, Arial, sans-serif", "size": 14, "color": INK},
        title={"font": {"size": 17}, "x": 0.01, "xanchor": "left"},
        paper_bgcolor="white",
        plot_bgcolor="white",
        colorway=[BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION],
        xaxis={"gridcolor": GRID, "linecolor": MUTED, "ticks": "outside", "tickcolor": MUTED, "zeroline": False},
        yaxis={"gridcolor": GRID, "linecolor": MUTED, "ticks": "outside", "tickcolor": MUTED, "zeroline": False},
        hoverlabel={"font": {"size": 13}, "align": "left", "bgcolor": "white"},
        legend={"orientation": "h", "x": 0, "yref": "container", "y": 0, "yanchor": "bottom", "font": {"size": 13}},
        margin={"l": 70, "r": 20, "t": 60, "b": 90},
    ),
    # Only of points: words within a bar or a cell have its colour behind them.
    data={"scatter": [{"textfont": {"shadow": HALO}}]},
)


def named_line(side: str | Sequence[str] = "top right") -> dict[str, object]:
    """How a line that has its name at one of its points looks: the name stands off the line, as off a mark, which here
    is not seen. Without one plotly lets words rest on the line, and their descenders cross it."""
    return {"mode": "lines+markers+text", "marker": {"opacity": 0, "size": 8}, "textposition": side}


def log_range(low: float, high: float) -> tuple[float, float]:
    """Axis range for a logarithmic plotly axis, which takes exponents of ten."""
    return math.log10(low), math.log10(high)


_MOST_DECADES_IN_STEPS, _MOST_DECADES, _OWN_BELOW = 3, 10, 0.66


def log_ticks(values: Sequence[float]) -> dict[str, list[object]]:
    """`tickvals` and `ticktext` of a logarithmic axis that shows these positive values: 1, 2 and 5 of each decade, or
    over more than three decades the powers of ten alone. plotly's own have digits 2 to 9, which run into one another;
    over less than two thirds of a decade it writes numbers out, and is left to it.
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    if high - low < _OWN_BELOW:
        return {}
    decades = range(math.floor(low) - 1, math.ceil(high) + 1)
    every = max(1, math.ceil((high - low) / _MOST_DECADES))
    steps = (1, 2, 5) if high - low <= _MOST_DECADES_IN_STEPS else (1,)
    past = 0.07 * (high - low)  # plotly draws an axis a little past what it shows
    marks = [(step, decade) for decade in decades if decade % every == 0 for step in steps]
    shown = [(s, d) for s, d in marks if low - past <= math.log10(s) + d <= high + past]
    return {"tickvals": [s * 10.0**d for s, d in shown], "ticktext": [_tick_text(s, d) for s, d in shown]}


def _tick_text(step: int, decade: int) -> str:
    if -4 < decade < 6:
        return f"{step * 10**decade:,}" if decade >= 0 else f"{step * 10.0**decade:.{-decade}f}"
    return f"{step}·10<sup>{decade}</sup>" if step > 1 else f"10<sup>{decade}</sup>"


_PNG_TIMEOUT_S = 25.0
_png_broken = threading.Event()


def to_png(figure: go.Figure, *, width: int = 1100, height: int | None = None) -> bytes | None:
    """The figure as PNG, drawn by plotly's renderer (kaleido), which needs Chromium; None where it cannot be drawn.

    Takes about 2 s, most of it the browser's start. After one failure it is not tried again in this process, so that a
    machine without a browser pays once.
    """
    if _png_broken.is_set():
        return None
    quiet_renderer()
    picture: list[bytes] = []
    plain = go.Figure(figure.to_dict())
    height = height or plain.layout.height or 480

    def draw() -> None:
        try:
            picture.append(plain.to_image(format="png", width=width, height=height, scale=1))
        except Exception as error:  # whatever is wrong with the browser, the lab goes on without a picture
            logging.getLogger(__name__).debug("no static picture: %s", error)

    thread = threading.Thread(target=draw, name="labkit-png", daemon=True)
    thread.start()
    thread.join(_PNG_TIMEOUT_S)
    if not picture:
        _png_broken.set()
        return None
    return picture[0]


def spread(values: Sequence[float], apart: float) -> list[float]:
    """The values moved until neighbours are at least `apart`, in the order that they have, about the same middle."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [values[i] for i in order]
    for _ in range(20 * len(places)):
        for i in range(len(places) - 1):
            missing = apart - (places[i + 1] - places[i])
            if missing > 1e-9:
                places[i] -= missing / 2
                places[i + 1] += missing / 2
    return [place for _, place in sorted(zip(order, places, strict=True))]
