"""Figures for a page that stands alone: plotly's script, which it needs once, and a place for each figure."""

import re
from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from labkit import _check


def figure_script() -> str:
    """plotly.js itself, 4.5 MB or so of JavaScript without a `</script>` in it."""
    return get_plotlyjs()


def figure_html(figure: Mapping[str, object], nonce: str) -> str:
    """HTML that draws a figure (plotly's JSON form) on a page on which `figure_script()` has run before.

    `nonce` is the one that the page's Content-Security-Policy allows scripts by.
    Errors: ValueError for what is not a figure of this plotly.
    """
    _check.require(isinstance(figure, Mapping), "figure", figure, "plotly's JSON form of a figure")
    drawn = go.Figure({key: figure[key] for key in ("data", "layout", "frames") if key in figure})
    config = {"displaylogo": False, "responsive": True}
    place = drawn.to_html(config=config, include_plotlyjs=False, include_mathjax=False, full_html=False)
    # plotly escapes < in all that it takes from the figure, so that these are its own tags.
    return re.sub(r"<script\b", f'<script nonce="{nonce}"', place)
