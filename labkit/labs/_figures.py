"""How every figure of the course looks: one template, one colour a technique or op family, and its static picture."""

import copy
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
INK, MUTED, GRID = "#1b1b1b", "#6b6b6b", "#e4e4e4"

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
}

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
    )
)


def log_range(low: float, high: float) -> tuple[float, float]:
    """Axis range for a logarithmic plotly axis, which takes exponents of ten."""
    return math.log10(low), math.log10(high)


def keep_state(figure: go.FigureWidget) -> None:
    """Put what the figure holds into the state that a page reads when it first draws it.

    plotly sends changes as messages, which a page drops that is still loading the widget's code; without this, a lab
    whose first result came before that would stay empty until the next one.
    """
    figure._widget_data = copy.deepcopy(figure._data)
    figure._widget_layout = copy.deepcopy(figure._layout)


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
