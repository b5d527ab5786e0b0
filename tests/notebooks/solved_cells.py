"""Solves each chapter's exercises in the kernel that nbval runs the chapter in, and watches that kernel's memory.

All that stands before the first exercise is the same with the solutions and without, so that it runs once. From there
on the cells run twice: solved, in the state that a chapter run with its solutions has reached there, and then as they
are kept, compared by nbval. That no kept cell needs what only a solution defines is a test of test_solutions.py.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable

import pytest
from nbformat import NotebookNode
from nbval.plugin import IPyNbCell, IPyNbFile

from labkit.cli.run import _peak_memory
from tests.notebooks.chapters import MEMORY_BYTES, PATHS, solutions_of, solved, verdicts
from tools.notebook_rules import exercise_names

# Runs a whole chapter by itself, for whom nbval does not.
_WHOLE_RUN = "test_chapter_runs_with_its_solutions"


class SolvedCells:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.memory: dict[IPyNbFile, tuple[contextlib.ExitStack, list[int]]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        cells: dict[IPyNbFile, list[IPyNbCell]] = {}
        for item in items:
            if isinstance(item, IPyNbCell):
                cells.setdefault(item.parent, []).append(item)
        whole = {file: own for file, own in cells.items() if file.path in PATHS and _is_whole(file, own)}
        for file, own in whole.items():
            begin = items.index(own[0])
            items[begin : begin + len(own)] = self._with_solved(file, own)
        stems = {file.path.stem for file in whole}
        again = [item for item in items if item.name in {f"{_WHOLE_RUN}[{stem}]" for stem in stems}]
        items[:] = [item for item in items if item not in again]
        config.hook.pytest_deselected(items=again)

    def _with_solved(self, file: IPyNbFile, cells: list[IPyNbCell]) -> list[pytest.Item]:
        first = next((n for n, item in enumerate(cells) if exercise_names(item.cell)), len(cells))
        sources = solved(copy.deepcopy(file.nb), solutions_of(file.path.stem[:2]))
        codes = [cell for cell in sources.cells if cell.cell_type == "code"][first:]
        tail = [_solved_cell(file, number, cell) for number, cell in enumerate(codes, first)]
        passed = [Passed.from_parent(file, name="exercises pass", cells=tail)] if tail else []
        memory = MemoryOfAll.from_parent(file, name="memory", plugin=self)
        return [*cells[:first], *tail, *passed, *cells[first:], memory]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        if isinstance(item, IPyNbCell) and item.parent not in self.memory:
            manager, stack = item.parent.kernel.km, contextlib.ExitStack()
            peak = stack.enter_context(_peak_memory(lambda: getattr(manager.provisioner, "pid", None)))
            self.memory[item.parent] = (stack, peak)

    def peak_bytes(self, file: IPyNbFile) -> int:
        """The most that the kernel and its children held; ends the watch."""
        stack, peak = self.memory[file]
        stack.close()
        return peak[0]


def _is_whole(file: IPyNbFile, cells: list[IPyNbCell]) -> bool:
    """Whether nothing of the chapter was left out of this run."""
    return len(cells) == sum(cell.cell_type == "code" for cell in file.nb.cells)


def _solved_cell(file: IPyNbFile, number: int, cell: NotebookNode) -> IPyNbCell:
    options = defaultdict(bool)  # its outputs are other ones than those that are kept
    return IPyNbCell.from_parent(file, name=f"Cell {number} solved", cell_num=number, cell=cell, options=options)


class _Last(pytest.Item):
    """An item of a notebook that looks at what its cells left."""

    def reportinfo(self) -> tuple[object, int, str]:
        return self.path, 0, f"{self.path.name}: {self.name}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo) -> str:
        return str(excinfo.value)


class Passed(_Last):
    """Every check says "passed" of its solution."""

    def __init__(self, *, cells: Iterable[IPyNbCell], **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.cells = list(cells)

    def runtest(self) -> None:
        names = [name for item in self.cells for name in exercise_names(item.cell)]
        said = verdicts((output for item in self.cells for output in item.test_outputs or ()), names)
        if said != dict.fromkeys(names, "passed"):
            raise AssertionError(f"the checks say {said}; solved are {names}")


class MemoryOfAll(_Last):
    """The kernel and what it started never held more than a chapter may need."""

    def __init__(self, *, plugin: SolvedCells, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.plugin = plugin

    def runtest(self) -> None:
        peak = self.plugin.peak_bytes(self.parent)
        if not 0 < peak <= MEMORY_BYTES:
            raise AssertionError(f"{peak / 1e9:.2f} GB in use at most; a chapter may need {MEMORY_BYTES / 1e9:.0f}")
