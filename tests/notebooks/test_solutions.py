"""Each chapter runs to its end with the exercises solved, every check passes, and it stays within its memory.

Under `--nbval` that happens in the kernel that nbval runs the chapter in (solved_cells.py); otherwise here.
"""

import ast
import symtable

import nbformat
import pytest

from labkit.cli.run import run_notebook
from tests.notebooks.chapters import MEMORY_BYTES, PATHS, names_of, outputs_of, solutions_of, solved, verdicts
from tools.notebook_rules import code_cells


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_exercises_and_solutions_are_the_same_set(path):
    names = names_of(nbformat.read(path, as_version=4))
    assert sorted(solutions_of(path.stem[:2])) == sorted(names)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_its_exercises_untouched(path):
    notebook = nbformat.read(path, as_version=4)
    names = names_of(notebook)
    assert verdicts(outputs_of(notebook), names) == dict.fromkeys(names, "not attempted yet")


def _defined(source: str) -> set[str]:
    """Names that a cell leaves behind."""
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def _read(source: str) -> set[str]:
    """Names that a cell reads, its functions' own among them."""
    names = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_cell_needs_what_only_a_solution_defines(path):
    """nbval runs the kept cells in the kernel that the solved ones have run in, and would not see it."""
    kept = [cell.source for cell in code_cells(nbformat.read(path, as_version=4))]
    defined, read = set().union(*map(_defined, kept)), set().union(*map(_read, kept))
    for name, source in solutions_of(path.stem[:2]).items():
        only = _defined(source) - defined
        assert not only & read, f"{name}: {sorted(only & read)}"


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
    ran = nbformat.read(tmp_path / "ran" / path.name, as_version=4)
    assert verdicts(outputs_of(ran), names) == dict.fromkeys(names, "passed")
    assert run.peak_bytes <= MEMORY_BYTES
