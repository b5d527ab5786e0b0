"""Each chapter runs to its end with the exercises solved, every check passes, and it stays within its memory."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from labkit.cli.run import NOTEBOOKS, run_notebook
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


def results(notebook: NotebookNode) -> Iterator[str]:
    """What the cells show as their values, as text."""
    for cell in code_cells(notebook):
        yield from (output.data["text/plain"] for output in cell.outputs if "text/plain" in output.get("data", {}))


def verdicts(notebook: NotebookNode, names: list[str]) -> dict[str, str]:
    """Exercise name to the last verdict that `check` showed for it, such as "passed"."""
    lines = [line.split(": ") for line in results(notebook)]
    return {name: line[1] for name in names for line in lines if line[0] == name and len(line) > 1}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_exercises_and_solutions_are_the_same_set(path):
    names = names_of(nbformat.read(path, as_version=4))
    assert sorted(solutions_of(path.stem[:2])) == sorted(names)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_its_exercises_untouched(path):
    notebook = nbformat.read(path, as_version=4)
    names = names_of(notebook)
    assert verdicts(notebook, names) == dict.fromkeys(names, "not attempted yet")


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_chapter_runs_with_its_solutions(path, tmp_path, capsys):
    notebook = nbformat.read(path, as_version=4)
    names = names_of(notebook)
    copy = tmp_path / path.name
    nbformat.write(solved(notebook, solutions_of(path.stem[:2])), copy)
    run = run_notebook(copy, save_to=tmp_path / "ran")
    with capsys.disabled():
        print(f"\n{path.name}, solved: Run All took {run.seconds:.1f} s and {(run.peak_bytes or 0) / 1e9:.2f} GB")
    assert run.ok, f"code cell {run.cell}: {run.error}\n{run.traceback}"
    assert verdicts(nbformat.read(tmp_path / "ran" / path.name, as_version=4), names) == dict.fromkeys(names, "passed")
    assert run.peak_bytes <= MEMORY_BYTES
