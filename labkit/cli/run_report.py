"""The report of a run: a table of how each chapter went and, as HTML, what each of them showed."""

import html
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from labkit.cli.chapter_content import plain, read_chapter
from labkit.cli.chapter_page import ChapterPage
from labkit.cli.table import Table, readable

_COLUMNS = ("chapter", "result", "seconds", "peak memory", "first error")
_ERROR_CHARS = 160


@dataclass(frozen=True)
class ChapterRun:
    """How one notebook went. `peak_bytes` is the resident memory of the kernel and its children at its highest,
    None where it could not be read; `cell` counts code cells from 1; `notebook` is what was run, with its outputs."""

    chapter: str
    ok: bool
    seconds: float
    peak_bytes: int | None = None
    cell: int | None = None
    error: str = ""
    traceback: str = ""
    notebook: object = field(default=None, repr=False, compare=False)


def runs_table(runs: Sequence[ChapterRun]) -> Table:
    """A row a chapter."""
    rows = []
    for run in runs:
        where = f"code cell {run.cell}: " if run.cell else ""
        error = " ".join(run.error.split())
        rows.append(
            {
                "chapter": run.chapter,
                "result": "ok" if run.ok else "FAILED",
                "seconds": f"{run.seconds:.1f}",
                "peak memory": readable(run.peak_bytes, "bytes") if run.peak_bytes else "not read",
                "first error": "" if run.ok else f"{where}{error}"[:_ERROR_CHARS],
            }
        )
    return Table.of(rows, _COLUMNS)


def write_report(runs: Sequence[ChapterRun], path: Path) -> Path:
    """Write the report, by the file's ending, and return the path.

    .html: machine, table, and every chapter's opening, contents, verdicts, figures, tables and text, in one file that
    loads nothing. .md: machine, table and each failure's traceback.
    """
    title = f"labkit run, {datetime.now():%Y-%m-%d %H:%M}"
    text = _page(title, runs) if path.suffix == ".html" else _markdown(title, runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _machine() -> str:
    from labkit import _check
    from labkit.ledger import device_name, library_versions

    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    return f"{device_name(_check.device('device', None))}; {versions}"


def _markdown(title: str, runs: Sequence[ChapterRun]) -> str:
    failed = [run for run in runs if not run.ok]
    details = "".join(f"\n## {run.chapter}\n\n````\n{plain(run.traceback)}\n````\n" for run in failed)
    return f"# {title}\n\n{_machine()}\n\n{runs_table(runs).markdown()}\n{details}"


# Nothing is fetched, and no script runs but those that carry this page's own number: what a notebook put into a table
# or a text stays a table or a text.
_POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; "
    "base-uri 'none'; form-action 'none'"
)
_STYLE = """
body {font: 15px/1.5 Helvetica, Arial, sans-serif; color: #1b1b1b}
body {max-width: 1120px; margin: 2rem auto; padding: 0 1rem}
h2 {border-top: 3px solid #0072B2; padding-top: .6rem; margin-top: 3rem}
table {border-collapse: collapse; margin: .6rem 0}
td, th {border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; vertical-align: top}
pre {white-space: pre-wrap; background: #f5f5f5; padding: .5rem .8rem; font-size: 13px; line-height: 1.4}
pre.error {background: #fdecea} img {max-width: 100%; height: auto; display: block}
nav ul {columns: 2; margin: .4rem 0; padding: 0; list-style: none} nav li.level-3 {margin-left: 1.4rem}
details {margin: .3rem 0} summary {cursor: pointer; color: #6b6b6b} .scroll {overflow-x: auto}
@media print {details:not([open]) {display: none}}
"""


def _page(title: str, runs: Sequence[ChapterRun]) -> str:
    """One HTML file. plotly's script is in it once, and only if a figure has no picture."""
    nonce = secrets.token_urlsafe(16)
    pages = [ChapterPage(read_chapter(run.notebook, run.chapter) if run.notebook else None, run, nonce) for run in runs]
    bodies = [page.html() for page in pages]
    script = ""
    if any(page.drew for page in pages):
        from labkit.labs.standalone import figure_script

        script = f'<script nonce="{nonce}">{figure_script()}</script>'
    links = "".join(f'<li><a href="#{page.anchor}">{html.escape(page.title)}</a></li>' for page in pages)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY.format(nonce=nonce)}">\n'
        f"<style>{_STYLE}</style>{script}</head><body>\n<h1>{html.escape(title)}</h1>\n"
        f"<p>{html.escape(_machine())}</p>\n{runs_table(runs).html()}\n<nav><ul>{links}</ul></nav>\n"
        + "\n".join(bodies)
        + "\n</body></html>\n"
    )
