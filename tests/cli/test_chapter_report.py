"""A run's report: each chapter's figures, tables, text and verdicts under their headings, in one safe HTML file."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.claims import NOT_MEASURED, claims_table, load_claims
from labkit.cli.chapter_content import PLOTLY, WIDGET, read_chapter
from labkit.cli.run_report import ChapterRun, write_report

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
PNG = base64.b64encode(b"not really a picture").decode()
FIGURE = go.Figure(data=[{"type": "bar", "y": [1, 2]}], layout={"title": {"text": "</script><b>T"}}).to_plotly_json()
TABLE = "<table><tbody><tr><td>7</td></tr></tbody></table>"
HOSTILE = "<script>alert(1)</script><img src='http://example.org/x.png' onerror=a()><a href='javascript:b()'>l</a>"


def code(*outputs):
    return new_code_cell("pass", outputs=list(outputs))


def shown(**data):
    return new_output("display_data", data={key.replace("_", "/", 1): value for key, value in data.items()})


def bundle(mime, value, text="as text"):
    return new_output("display_data", data={mime: value, "text/plain": text})


def printed(text, name="stdout"):
    return new_output("stream", name=name, text=text)


def notebook(*cells):
    opening = new_markdown_cell("# 07 · A *title*\n\n**The question:** why?")
    return new_notebook(cells=[opening, *cells])


def page_of(tmp_path, *cells, **how):
    run = ChapterRun("07_x", **({"ok": True, "seconds": 1.0} | how), notebook=notebook(*cells))
    return write_report([run], tmp_path / "r.html").read_text()


class Tags(HTMLParser):
    """Every start tag of a page with its attributes, and the text outside scripts."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_outputs_stand_under_their_heading():
    chapter = read_chapter(
        notebook(
            new_markdown_cell("What the last chapter left."),
            code(printed("before\n")),
            new_markdown_cell("after a code cell, this is no opening"),
            new_markdown_cell("## 1 · First `x`\n\n```python\n# no heading\n```"),
            code(printed("one\n"), printed("noise\n", "stderr"), printed("two\n"), bundle("image/png", PNG)),
            new_markdown_cell("### Below\n\ntext\n\n## 2 · Empty"),
        ),
        "07_x",
    )
    assert (chapter.title, chapter.opening) == (
        "07 · A title",
        "**The question:** why?\n\nWhat the last chapter left.",
    )
    assert [(s.heading, s.level, [o.kind for o in s.outputs]) for s in chapter.sections] == [
        ("", 2, ["text"]),
        ("1 · First x", 2, ["text", "picture"]),
        ("Below", 3, []),
        ("2 · Empty", 2, []),
    ]
    assert chapter.sections[1].outputs[0].content == "one\ntwo\n"


@pytest.mark.parametrize(
    ("data", "kind", "content"),
    [
        ({WIDGET: {}, "image/png": PNG, PLOTLY: FIGURE, "text/html": "<p>", "text/plain": "t"}, "picture", PNG),
        ({PLOTLY: FIGURE, "text/html": "<p>", "text/plain": "t"}, "figure", FIGURE),
        ({"text/html": "<p>", "text/plain": "t"}, "table", "<p>"),
        ({WIDGET: {"model_id": "1"}, "text/plain": "t"}, "lab", "t"),
        ({"text/plain": "\x1b[31mt\x1b[0m"}, "text", "t"),
    ],
)
def test_the_richest_form_that_needs_no_kernel_is_taken(data, kind, content):
    (section,) = read_chapter(notebook(code(new_output("display_data", data=data))), "x").sections
    assert [(o.kind, o.content) for o in section.outputs] == [(kind, content)]


def test_a_widget_without_any_other_form_shows_nothing():
    assert read_chapter(notebook(code(bundle(WIDGET, {}, ""))), "x").sections == ()


def test_verdicts_are_those_of_the_claims_table():
    claims = load_claims(1)
    table = claims_table(1, {claims[0].id: {"one": 0.0, "two": 1e30}, claims[1].id: 1e30})
    early, late = str(table), new_output("execute_result", data={"text/plain": repr(claims_table(1, {}))})
    chapter = read_chapter(notebook(code(printed(early)), code(late)), "x")
    assert chapter.verdicts == {row.claim.claim: row.verdict for row in table.rows}
    assert {NOT_MEASURED} < set(chapter.verdicts.values())


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("0[1-9]_*.ipynb")), ids=lambda path: path.stem)
def test_every_claim_of_a_chapter_has_a_verdict_in_its_notebook(path):
    chapter = read_chapter(nbformat.read(path, as_version=4), "x")
    assert set(chapter.verdicts) == {claim.claim for claim in load_claims(path.stem[:2])}


def test_the_page_has_opening_contents_verdicts_and_what_was_shown(tmp_path):
    page = page_of(
        tmp_path,
        new_markdown_cell("## Seen\n"),
        code(bundle("image/png", PNG, "first line\nsecond"), bundle("text/html", TABLE)),
        new_markdown_cell("## Unseen"),
        code(printed(str(claims_table(1, {})))),
        new_markdown_cell("## Empty"),
    )
    assert "<strong>The question:</strong> why?" in page
    assert f'<img alt="first line" src="data:image/png;base64,{PNG}">' in page
    assert TABLE in page and "first line\nsecond</pre>" in page
    contents = re.findall(r'<li class="level-2">(.*?)</li>', page)
    targets = [re.search('#([^"]+)', item)[1] for item in contents[:2]]
    assert contents[2] == "Empty" and all(f'id="{target}"' in page for target in targets)
    assert page.index("<h3>Verdicts</h3>") < page.index(">Seen</h3>") < page.index(PNG) < page.index(">Unseen</h3>")
    assert page.count(f'<td style="text-align:left">{NOT_MEASURED}</td>') == len(load_claims(1))


def test_nothing_is_loaded_and_no_foreign_script_runs(tmp_path):
    page = page_of(
        tmp_path,
        new_markdown_cell(f"{HOSTILE}\n\ntext {HOSTILE}\n\n[link](javascript:c())"),
        new_markdown_cell(f"## {HOSTILE}"),
        code(bundle("text/html", HOSTILE, HOSTILE), printed(HOSTILE), bundle(PLOTLY, FIGURE, HOSTILE)),
        code(bundle("image/png", PNG + '"><script>alert(2)</script>', HOSTILE)),
        code(new_output("error", ename="E", evalue=HOSTILE, traceback=[f"\x1b[0;31m{HOSTILE}"])),
        ok=False,
        error=HOSTILE,
        traceback=HOSTILE,
    )
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    (nonce,) = re.findall(r"script-src 'nonce-([^']+)'", policy)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy
    tags = Tags(page)
    scripts = [attrs for tag, attrs in tags.found if tag == "script"]
    assert scripts == [{"nonce": nonce}] * 2
    outside = [a for _, attrs in tags.found for a in attrs.items() if a[0] in ("src", "href") and "java" in str(a[1])]
    assert outside == [] and not any(key.startswith("on") for _, attrs in tags.found for key in attrs)
    assert {attrs["src"][:22] for tag, attrs in tags.found if tag == "img"} == {"data:image/png;base64,"}
    assert "\x1b" not in page and tags.text.count("alert(1)") >= 8


@pytest.mark.parametrize(("pictures", "scripts"), [([True, True], 0), ([False, False], 1), ([True, False], 1)])
def test_plotlys_script_is_in_the_page_once_and_only_where_a_picture_is_missing(tmp_path, pictures, scripts):
    outputs = [bundle("image/png", PNG) if with_picture else bundle(PLOTLY, FIGURE) for with_picture in pictures]
    page = page_of(tmp_path, code(*outputs))
    assert page.count("plotly.js v") == scripts
    assert page.count("Plotly.newPlot(") - page.count(PLOTLY) >= pictures.count(False)
    assert page.count('class="plotly-graph-div"') == pictures.count(False)
    assert len(page) < (10_000 if not scripts else 6_000_000)


def test_a_figure_that_this_plotly_does_not_know_is_shown_as_text(tmp_path):
    page = page_of(tmp_path, code(bundle(PLOTLY, {"data": [{"type": "no such trace"}]}, "its text <form>")))
    assert "<pre>its text &lt;form&gt;</pre>" in page and "plotly.js v" not in page


def test_a_failure_stands_at_its_chapter_with_its_traceback(tmp_path):
    page = page_of(tmp_path, ok=False, error="ValueError: no", traceback="\x1b[31mTraceback <x>", cell=3)
    assert '<pre class="error">Traceback &lt;x&gt;</pre>' in page
    assert "07_x: FAILED: ValueError: no, 1.0 s" in page and "code cell 3: ValueError: no" in page
