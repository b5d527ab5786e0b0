"""What a notebook of the course must keep to. `make notebooks` reports it and the tests assert it."""

import ast
import re
from collections.abc import Iterator
from statistics import median

import nbformat
from nbformat import NotebookNode

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"
MEDIAN_CODE_LINES = 8
EXERCISES_A_CHAPTER = 3
_TIMING_METADATA = ("execution", "ExecuteTime", "papermill")
_PATH = re.compile(
    r"(?<![\w.~:/-])(/(?:home|root|Users|tmp|private|mnt|work|workspace|content|opt|var)/[^\s\"'<]*|[A-Z]:\\\\?Users\\)"
)


def violations(notebook: NotebookNode, stem: str) -> list[str]:
    """Every rule that the notebook breaks, as sentences; empty if none. `stem`: its file name without the ending."""
    return [*_form(notebook), *_outputs(notebook), *_teaching(notebook, stem)]


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells that hold code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def exercise_names(cell: NotebookNode) -> list[str]:
    """The names of a cell's `exercise:<name>` tags."""
    tags = cell.metadata.get("tags", [])
    return [tag.removeprefix("exercise:") for tag in tags if tag.startswith("exercise:")]


def is_compared(cell: NotebookNode) -> bool:
    """Whether nbval holds the cell's output against the one kept."""
    return not _has_marker(cell, "NBVAL_IGNORE_OUTPUT") and not _has_marker(cell, "NBVAL_SKIP")


def _has_marker(cell: NotebookNode, marker: str) -> bool:
    comments = (line.strip().lstrip("#").strip() for line in cell.source.splitlines() if line.strip().startswith("#"))
    return marker in comments or marker.lower().replace("_", "-") in cell.metadata.get("tags", [])


def _form(notebook: NotebookNode) -> Iterator[str]:
    """What the file itself must look like."""
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        yield f"not a valid notebook: {error}"
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        yield "kernelspec is not python3: JupyterLab would ask for a kernel at every opening"
    if "widgets" in notebook.metadata:
        yield "holds widget state"
    counts = [cell.execution_count for cell in code_cells(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts are {counts}, not 1 to {len(counts)}: run `make notebooks`"
    timed = [n for n, cell in enumerate(notebook.cells) if any(key in cell.metadata for key in _TIMING_METADATA)]
    if timed:
        yield f"cells {timed} hold timing metadata"


def _outputs(notebook: NotebookNode) -> Iterator[str]:
    """What is kept of a run. Cells are counted as code cells, from 1."""
    for number, cell in enumerate(code_cells(notebook), 1):
        if _has_marker(cell, "NBVAL_SKIP"):
            yield f"code cell {number} is skipped by nbval"
        if not cell.outputs and _prints(cell.source):
            yield f"code cell {number} prints, and its output is not kept"
        if "lab" in cell.metadata.get("tags", []) and not any("image/png" in o.get("data", {}) for o in cell.outputs):
            yield f"code cell {number} is a lab without a static PNG"
        for output in cell.outputs:
            data = output.get("data", {})
            if output.output_type == "error":
                yield f"code cell {number} keeps an error: {output.ename}"
            if WIDGET_VIEW in data:
                yield f"code cell {number} keeps a live widget"
            if PLOTLY in data and "image/png" not in data:
                yield f"code cell {number} keeps a figure without a static PNG"
    for number, text in _texts(notebook):
        if found := _PATH.search(text):
            yield f"cell {number} names a path of one machine: {found[1][:60]}"


def _prints(source: str) -> bool:
    """Whether the cell calls `print` where it surely runs: at its top level."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic
        return False
    calls = (statement.value for statement in body if isinstance(statement, ast.Expr))
    return any(isinstance(call, ast.Call) and getattr(call.func, "id", None) == "print" for call in calls)


def _texts(notebook: NotebookNode) -> Iterator[tuple[int, str]]:
    """Every text in the notebook that a reader may see, with its cell's number, counted from 1."""
    for number, cell in enumerate(notebook.cells, 1):
        yield number, cell.source
        for output in cell.get("outputs", []):
            kept = {mime: value for mime, value in output.get("data", {}).items() if not mime.startswith("image/p")}
            yield number, "\n".join([output.get("text", ""), *output.get("traceback", []), *map(str, kept.values())])


def _teaching(notebook: NotebookNode, stem: str) -> Iterator[str]:
    """What a chapter owes its reader."""
    code = code_cells(notebook)
    markdown = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    if not notebook.cells or notebook.cells[0].cell_type != "markdown" or not notebook.cells[0].source.startswith("# "):
        yield "does not open with a markdown title"
    if len(markdown) < 2 * len(code):
        yield f"{len(markdown)} markdown cells for {len(code)} code cells: fewer than two to one"
    lines = [sum(bool(line.strip()) for line in cell.source.splitlines()) for cell in code]
    if lines and median(lines) > MEDIAN_CODE_LINES:
        yield f"the median code cell has {median(lines)} lines, more than {MEDIAN_CODE_LINES}"
    compared = sum(map(is_compared, code))
    if 2 * compared < len(code):
        yield f"nbval compares {compared} of {len(code)} code cells, fewer than half"
    exercises = [name for cell in code for name in exercise_names(cell)]
    if len(set(exercises)) < len(exercises):
        yield f"an exercise's tag stands on two cells: {exercises}"
    if not stem.startswith("00") and len(exercises) < EXERCISES_A_CHAPTER:
        yield f"{len(exercises)} exercises, fewer than {EXERCISES_A_CHAPTER}"
