"""A chapter's exercises, their solutions, and what `check` said of them."""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

from nbformat import NotebookNode

from labkit.cli.run import NOTEBOOKS
from tools.notebook_rules import code_cells, exercise_names

PATHS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
SOLUTIONS = Path(__file__).parents[1] / "solutions"
MEMORY_BYTES = 6e9


def names_of(notebook: NotebookNode) -> list[str]:
    return [name for cell in code_cells(notebook) for name in exercise_names(cell)]


def solutions_of(chapter: str) -> dict[str, str]:
    """Exercise name to the source of its cell, solved; empty for a chapter that has none."""
    path = SOLUTIONS / f"ch{chapter}.py"
    if not path.exists():
        return {}
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SOLUTIONS


def solved(notebook: NotebookNode, solutions: dict[str, str]) -> NotebookNode:
    """The notebook with the source of each `exercise:<name>` cell replaced; in place, returned."""
    for cell in code_cells(notebook):
        for name in exercise_names(cell):
            cell.source = solutions[name].strip()
    return notebook


def texts(outputs: Iterable[NotebookNode]) -> Iterator[str]:
    """What cells showed as their values, as text."""
    yield from (output.data["text/plain"] for output in outputs if "text/plain" in output.get("data", {}))


def verdicts(outputs: Iterable[NotebookNode], names: list[str]) -> dict[str, str]:
    """Exercise name to the last verdict that `check` showed for it, such as "passed"."""
    lines = [line.split(": ") for line in texts(outputs)]
    return {name: line[1] for name in names for line in lines if line[0] == name and len(line) > 1}


def outputs_of(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in code_cells(notebook):
        yield from cell.outputs
