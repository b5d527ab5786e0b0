"""One chapter of a run's report as HTML: opening, contents, verdicts, and under each heading what it showed."""

import html
from typing import TYPE_CHECKING

from labkit._table import Table
from labkit.cli.chapter_content import Chapter, Output, Section, plain

if TYPE_CHECKING:
    from labkit.cli.run_report import ChapterRun

# What a table, an exercise's answer or a lab's numbers are made of. Anything else is shown as the text that it is.
_TAGS = "table thead tbody tr th td caption br div span p ul ol li b strong i em code pre sub sup".split()
_ATTRIBUTES = {"th": ["colspan", "rowspan"], "td": ["colspan", "rowspan"]}
# Printed lines that are shown open; what is longer is folded.
_OPEN_LINES = 15


class ChapterPage:
    """`drew` says, once `html()` was called, whether a figure of it needs plotly's script on the page."""

    def __init__(self, chapter: Chapter | None, run: "ChapterRun", nonce: str) -> None:
        self.chapter, self.run, self.nonce = chapter, run, nonce
        self.drew = False
        self.anchor = f"chapter-{_anchor(run.chapter)}"
        self.title = chapter.title if chapter else run.chapter

    def html(self) -> str:
        """The chapter, from its heading; every text escaped."""
        run = self.run
        result = "ok" if run.ok else f"FAILED: {run.error}"
        parts = [
            f'<h2 id="{self.anchor}">{html.escape(self.title)}</h2>',
            f"<p>{html.escape(run.chapter)}: {html.escape(result)}, {run.seconds:.1f} s</p>",
        ]
        if not run.ok:
            parts.append(f'<pre class="error">{html.escape(plain(run.traceback))}</pre>')
        if self.chapter:
            parts += [markdown_html(self.chapter.opening), self._contents(), self._verdicts()]
            parts += [self._section(number, section) for number, section in enumerate(self.chapter.sections)]
        return "\n".join(part for part in parts if part)

    def _contents(self) -> str:
        """The headings; those under which something was shown are links."""
        items = []
        for number, section in enumerate(self.chapter.sections):
            if section.heading:
                text = html.escape(section.heading)
                link = f'<a href="#{self.anchor}-{number}">{text}</a>' if section.outputs else text
                items.append(f'<li class="level-{section.level}">{link}</li>')
        return f"<details open><summary>Contents</summary><nav><ul>{''.join(items)}</ul></nav></details>"

    def _verdicts(self) -> str:
        rows = tuple(self.chapter.verdicts.items())
        return f"<h3>Verdicts</h3>\n{Table(('claim', 'verdict here'), rows).html()}" if rows else ""

    def _section(self, number: int, section: Section) -> str:
        if not section.outputs:
            return ""
        tag = f"h{min(section.level + 1, 6)}"
        heading = (
            f'<{tag} id="{self.anchor}-{number}">{html.escape(section.heading)}</{tag}>' if section.heading else ""
        )
        return "\n".join([heading, *map(self._output, section.outputs)])

    def _output(self, output: Output) -> str:
        if output.kind == "picture":
            alt = html.escape(next(iter(output.text.splitlines()), "a figure"))
            return f'<img alt="{alt}" src="data:image/png;base64,{html.escape(output.content)}">' + _folded(output.text)
        if output.kind == "figure":
            return self._figure(output)
        if output.kind == "table":
            return f'<div class="scroll">{safe_html(output.content)}</div>'
        if output.kind == "text" and (lines := len(output.content.splitlines())) > _OPEN_LINES:
            return _folded(output.content, f"{lines} lines of text")
        return f'<pre class="{output.kind}">{html.escape(output.content)}</pre>'

    def _figure(self, output: Output) -> str:
        """Drawn by the browser, where this plotly knows the figure; its text form otherwise."""
        from labkit.labs.standalone import figure_html

        try:
            drawn = figure_html(output.content, self.nonce)
        except ValueError:
            return f"<pre>{html.escape(output.text or 'a figure of another version of plotly')}</pre>"
        self.drew = True
        return drawn + _folded(output.text)


def _anchor(name: str) -> str:
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in name)


def _folded(text: str, summary: str = "As text") -> str:
    if not text.strip():
        return ""
    return f"<details><summary>{summary}</summary><pre>{html.escape(text)}</pre></details>"


def markdown_html(source: str) -> str:
    """Markdown as a notebook shows it; HTML in it is escaped, and a link runs no script."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    renderer = IPythonRenderer(escape=True, allow_harmful_protocols=False, exclude_anchor_links=True)
    try:
        return MarkdownWithMath(renderer=renderer).render(source)
    except Exception:  # such as a picture that the notebook names and does not hold: its text is better than nothing
        return f"<pre>{html.escape(source)}</pre>"


def safe_html(source: str) -> str:
    """A notebook's HTML with the tags of tables and texts alone; other tags are escaped, and attributes go."""
    from nbconvert.preprocessors.sanitize import SanitizeHTML

    return SanitizeHTML(tags=_TAGS, attributes=_ATTRIBUTES).sanitize_html_tags(source)
