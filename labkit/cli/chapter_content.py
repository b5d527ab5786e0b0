"""What a notebook that has run shows, by heading: figures, tables, text and errors; and the verdicts on its claims."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TITLE = re.compile(r"\A\s*# [^\n]*\n?")
# A block of `ClaimsTable` as text: its first line says the claim, its last line the verdict.
_CLAIM = re.compile(r"^claim {2,}([^\n]+)\n(?:(?!claim {2})[^\n]*\n)*?verdict {2,}([^\n]+)", re.MULTILINE)


@dataclass(frozen=True)
class Output:
    """One thing that a cell showed.

    `kind` says what `content` is: "picture" (a PNG in base64), "figure" (plotly's figure as a mapping), "table" (HTML
    as the notebook holds it, safe or not), "lab" or "text" (plain), "error" (plain, the traceback). `text` is the
    plain form beside it, "" where there is none.
    """

    kind: str
    content: str | Mapping[str, object]
    text: str = ""


@dataclass(frozen=True)
class Section:
    """A heading with its level (2 is the highest below the title), and what the cells under it showed."""

    heading: str
    level: int
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True)
class Chapter:
    """`opening` is the Markdown before the first section or code cell; `verdicts` are by claim."""

    title: str
    opening: str
    sections: tuple[Section, ...]
    verdicts: dict[str, str]


def read_chapter(notebook: object, name: str) -> Chapter:
    """What a notebook (nbformat 4, as nbformat reads it) shows. `name` is the title of one without a title."""
    title, opening, opened = name, [], False
    sections, outputs = [Section("", 2)], []

    def close() -> None:
        sections[-1] = Section(sections[-1].heading, sections[-1].level, tuple(outputs))
        outputs.clear()

    for cell in notebook.cells:
        if cell.cell_type == "code":
            opened = True
            outputs += _outputs(cell)
        elif cell.cell_type == "markdown":
            for level, heading in _headings(cell.source):
                if level == 1:
                    title = heading
                else:
                    opened = True
                    close()
                    sections.append(Section(heading, level))
            if not opened:
                opening.append(_TITLE.sub("", cell.source))
    close()
    kept = tuple(s for s in sections if s.heading or s.outputs)
    return Chapter(title, "\n\n".join(opening).strip(), kept, _verdicts(s.outputs for s in kept))


def plain(text: str) -> str:
    """Text without a terminal's colours."""
    return _TERMINAL_COLOURS.sub("", text)


def _headings(source: str) -> Iterator[tuple[int, str]]:
    """Level and text of each heading; a comment in a block of code is none."""
    from nbconvert.filters.markdown_mistune import MarkdownWithMath

    for token in MarkdownWithMath(renderer=None)(source):
        if token["type"] == "heading":
            yield token["attrs"]["level"], _text_of(token["children"])


def _text_of(tokens: Iterable[Mapping[str, object]]) -> str:
    return "".join(t.get("raw", "") or _text_of(t.get("children", ())) for t in tokens)


def _outputs(cell: object) -> list[Output]:
    """Of a code cell, in order: what was printed in one piece, and nothing of what went to the error stream."""
    found: list[Output] = []
    for output in cell.outputs:
        if output.output_type == "error":
            found.append(Output("error", plain("\n".join(output.traceback) or f"{output.ename}: {output.evalue}")))
        elif output.output_type != "stream":
            found += _richest(output.data)
        elif output.name == "stdout" and output.text.strip():
            before = found.pop().content if found and found[-1].kind == "text" else ""
            found.append(Output("text", before + plain(output.text)))
    return found


def _richest(data: Mapping[str, object]) -> list[Output]:
    """The best form of a bundle that a page without a kernel can show; none where there is no such form."""
    text = plain(str(data.get("text/plain", "")))
    if "image/png" in data:
        return [Output("picture", "".join(str(data["image/png"]).split()), text)]
    if PLOTLY in data:
        return [Output("figure", data[PLOTLY], text)]
    if "text/html" in data:
        return [Output("table", str(data["text/html"]), text)]
    return [Output("lab" if WIDGET in data else "text", text)] if text else []


def _verdicts(of_sections: Iterable[Iterable[Output]]) -> dict[str, str]:
    """By claim. A chapter may show its table in parts: what a later one did measure counts."""
    from labkit.claims import NOT_MEASURED

    found: dict[str, str] = {}
    for output in (output for outputs in of_sections for output in outputs):
        text = output.text or (output.content if output.kind == "text" else "")
        for claim, verdict in _CLAIM.findall(text):
            if verdict != NOT_MEASURED or claim not in found:
                found[claim] = verdict
    return found
