"""A small table, as text for a terminal and as escaped HTML, and figures with the prefix that a person would write."""

import html
from dataclasses import dataclass

SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SI_UNITS = {"bytes": "B", "bytes/s": "B/s", "FLOP": "FLOP", "FLOPs": "FLOPs", "FLOP/s": "FLOP/s"}
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def scaled(value: float, steps: tuple[tuple[float, str], ...], digits: int = 3) -> tuple[float, str]:
    """`value` in the largest of `steps` that it reaches once rounded to `digits`, and that step's name.

    Rounding comes first, so that 999.9996 M is 1.00 G and not 1000 M; below every step it stays in the smallest.
    """
    rounded = float(f"{abs(value):.{digits - 1}e}")
    factor, name = next((step for step in steps if rounded >= step[0]), steps[-1])
    return value / factor, name


def readable(value: float, unit: str) -> str:
    """`value` with its unit, to three digits or so: "141 GB", "1.25 ms", "56.1%", "2.8x"; other units keep theirs."""
    if unit == "fraction":
        return f"{100 * value:.3g}%"
    if unit == "ratio":
        return f"{value:.3g}x"
    if unit == "s" and 0 < abs(value) < 100:
        number, name = scaled(value, SECONDS)
        return f"{number:.3g} {name}"
    if unit in _SI_UNITS:
        number, prefix = scaled(value, SI)
        return f"{number:.3g} {prefix}{_SI_UNITS[unit]}"
    return f"{value:.4g} {unit}".rstrip()


@dataclass(frozen=True, repr=False)
class Table:
    """Column names, and rows of as many cells of text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()

    def text(self) -> str:
        """Aligned columns."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        lines.insert(1, tuple("-" * width for width in widths))
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def html(self) -> str:
        """An HTML table; every cell is escaped, and a line end in a cell is a line break."""

        def row(tag: str, cells: tuple[str, ...]) -> str:
            escaped = (html.escape(cell).replace("\n", "<br>") for cell in cells)
            return "<tr>" + "".join(f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in escaped) + "</tr>"

        body = "\n".join(row("td", cells) for cells in self.rows)
        return f"<table>\n<thead>{row('th', self.columns)}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"
