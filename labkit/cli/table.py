"""The table of `labkit._table` from mappings, and in the other forms that a report is written in."""

import csv
import html
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from labkit import _table
from labkit._table import readable

__all__ = ["FORMATS", "Table", "html_page", "readable"]


@dataclass(frozen=True, repr=False)
class Table(_table.Table):
    """Column names, and rows of as many cells of text."""

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, object]], columns: Iterable[str]) -> "Table":
        """From one mapping a row; a missing or None cell is empty."""
        columns = tuple(columns)
        cells = ((row.get(column) for column in columns) for row in rows)
        return cls(columns, tuple(tuple("" if cell is None else str(cell) for cell in row) for row in cells))

    def markdown(self) -> str:
        """A GitHub table; a bar, a line end or HTML inside a cell is escaped."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        marks = str.maketrans({"|": "\\|", "\n": " ", "<": "&lt;", "&": "&amp;"})
        escaped = ((cell.translate(marks) for cell in line) for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)

    def csv(self) -> str:
        """Comma-separated, quoted where needed, one header line."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.columns, *self.rows])
        return out.getvalue()


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{font: 15px/1.5 sans-serif; margin: 2rem}} table {{border-collapse: collapse}}
td, th {{border: 1px solid #ccc; padding: .25rem .6rem}} pre {{white-space: pre-wrap}}</style>
</head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def html_page(title: str, body: str) -> str:
    """A page that stands alone; `body` is HTML that is already escaped."""
    return _PAGE.format(title=html.escape(title), body=body)


FORMATS: dict[str, Callable[[Table], str]] = {
    "text": Table.text,
    "markdown": Table.markdown,
    "html": Table.html,
    "csv": Table.csv,
}
