"""Every notebook keeps to the rules of tools/notebook_rules.py, and each rule catches what it is there for."""

import copy
from collections.abc import Callable

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.cli.run import NOTEBOOKS
from tools.notebook_rules import PLOTLY, WIDGET_VIEW, violations
from tools.notebooks import KERNELSPEC, normalise, refresh, without_paths

PATHS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
PNG = "iVBORw0KGgo="


def test_there_are_notebooks():
    assert PATHS


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_keeps_to_the_rules(path):
    assert violations(nbformat.read(path, as_version=4), path.stem) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_is_stored_normalised(path):
    notebook = nbformat.read(path, as_version=4)
    normal = nbformat.writes(normalise(notebook)) == nbformat.writes(notebook)
    assert normal, "run `make notebooks`, or `python -m tools.notebooks --no-run` where only the text has changed"


@pytest.fixture
def chapter() -> NotebookNode:
    """A notebook that breaks no rule: two compared cells, a lab with its picture, three exercises."""
    figure = new_output("display_data", data={PLOTLY: {"data": []}, "text/plain": "figure", "image/png": PNG})
    cells = [
        new_code_cell("print(1 + 1)", outputs=[new_output("stream", name="stdout", text="2\n")]),
        new_code_cell("roofline_lab()", metadata={"tags": ["lab", "nbval-ignore-output"]}, outputs=[figure]),
        *(new_code_cell(f"answer = {n}", metadata={"tags": [f"exercise:e{n}"]}) for n in range(3)),
    ]
    for count, cell in enumerate(cells, 1):
        cell.execution_count = count
    text = [new_markdown_cell("# A title"), *(new_markdown_cell(f"Text {n}.") for n in range(9))]
    return new_notebook(cells=[*text, *cells], metadata={"kernelspec": KERNELSPEC})


def code(notebook: NotebookNode, number: int) -> NotebookNode:
    return [cell for cell in notebook.cells if cell.cell_type == "code"][number]


def breakages() -> dict[str, Callable[[NotebookNode], object]]:
    """What the rule says, to a change that breaks it."""
    error = new_output("error", ename="ValueError", evalue="no", traceback=[])
    view = new_output("display_data", data={WIDGET_VIEW: {}, "image/png": PNG})
    figure = new_output("display_data", data={PLOTLY: {}})
    path = new_output("stream", name="stdout", text="see /home/someone/file.py\n")
    return {
        "kernelspec": lambda nb: nb.metadata.pop("kernelspec"),
        "widget state": lambda nb: nb.metadata.update(widgets={}),
        "execution counts": lambda nb: code(nb, 0).update(execution_count=7),
        "timing": lambda nb: code(nb, 0).metadata.update(execution={"iopub.execute_input": "now"}),
        "not kept": lambda nb: code(nb, 0).update(outputs=[]),
        "lab without a static PNG": lambda nb: code(nb, 1).outputs[0].data.pop("image/png"),
        "keeps an error: ValueError": lambda nb: code(nb, 0).outputs.append(error),
        "live widget": lambda nb: code(nb, 0).outputs.append(view),
        "figure without a static PNG": lambda nb: code(nb, 0).outputs.append(figure),
        "path of one machine: /home/someone": lambda nb: code(nb, 0).outputs.append(path),
        "path of one machine: /root/": lambda nb: nb.cells[1].update(source="Look in /root/models."),
        "skipped": lambda nb: code(nb, 0).update(source="# NBVAL_SKIP\nx = 1"),
        "markdown title": lambda nb: nb.cells.pop(0),
        "two to one": lambda nb: nb.cells.pop(3),
        "median code cell": lambda nb: [code(nb, n).update(source="x = 1\n" * 9) for n in range(3)],
        "compares 2 of 5": lambda nb: [code(nb, n).metadata.tags.append("nbval-ignore-output") for n in (2, 3)],
        "2 exercises": lambda nb: code(nb, 2).metadata.update(tags=[]),
        "stands on two cells": lambda nb: code(nb, 2).metadata.update(tags=["exercise:e1"]),
        "not a valid notebook": lambda nb: nb.cells[0].metadata.update(tags=["same", "same"]),
    }


def test_a_clean_chapter_breaks_no_rule(chapter):
    assert violations(chapter, "01_test") == []


@pytest.mark.parametrize("says", breakages())
def test_each_rule_catches_its_breakage(chapter, says):
    breakages()[says](chapter)
    assert any(says in violation for violation in violations(chapter, "01_test")), violations(chapter, "01_test")


def test_normalise_mends_what_a_run_leaves(chapter):
    dirty = copy.deepcopy(chapter)
    breaks = breakages()
    for says in ("kernelspec", "widget state", "execution counts", "timing", "live widget"):
        breaks[says](dirty)
    ids = [cell.id for cell in dirty.cells]
    clean = normalise(dirty)
    assert violations(clean, "01_test") == []
    assert [cell.id for cell in clean.cells] == ids
    assert normalise(clean) == clean


def test_normalise_joins_streams_and_keeps_the_last_of_a_progress_bar(chapter):
    bar = [new_output("stream", name="stderr", text=text) for text in ("\r 10%", "\r100%", "\n")]
    code(chapter, 0).outputs = [bar[0], new_output("stream", name="stdout", text="2\n"), *bar[1:]]
    outputs = code(normalise(chapter), 0).outputs
    assert [(output.name, output.text) for output in outputs] == [("stderr", "100%\n"), ("stdout", "2\n")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/someone/course/notebooks/00.ipynb", "./notebooks/00.ipynb"),
        ("in /home/someone/.cache, and '/home/someone'", "in ~/.cache, and '~'"),
        ("/some/tmp/ipykernel_12/34.py:5: UserWarning", "cell:5: UserWarning"),
        ("/home/someone/course2/file and /home/someone-else", "~/course2/file and /home/someone-else"),
    ],
)
def test_paths_are_named_for_any_reader(text, expected, monkeypatch):
    monkeypatch.setattr("tools.notebooks._folders", lambda: {"/home/someone": "~", "/home/someone/course": "."})
    assert without_paths(text) == expected


def test_this_machines_folders_are_among_those_named():
    assert without_paths(f"{NOTEBOOKS}/00.ipynb") == "./notebooks/00.ipynb"


def test_refresh_runs_and_writes_back_only_what_ran(tmp_path, chapter, monkeypatch):
    monkeypatch.setenv("LABKIT_LEDGER", str(tmp_path / "ledger.jsonl"))
    path = tmp_path / "01_test.ipynb"
    for cell in chapter.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    code(chapter, 1).source = "# NBVAL_IGNORE_OUTPUT\nimport os"
    code(chapter, 1).metadata.tags = []
    nbformat.write(chapter, path)
    assert refresh(path) == []
    assert code(nbformat.read(path, as_version=4), 0).outputs[0].text == "2\n"

    kept = path.read_bytes()
    code(chapter, 0).source = "1 / 0"
    nbformat.write(chapter, path)
    broken = path.read_bytes()
    assert "ZeroDivisionError" in refresh(path)[0]
    assert path.read_bytes() == broken != kept
