"""`make bench` turns what it measures into figures, verdicts and ledger lines. Nothing here is timed."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit.measure import Ledger
from tools import bench
from tools.bench import Figure


@pytest.mark.parametrize(
    "values, at_least, met",
    [((1.0, 1.4, 9.0), True, True), ((1.0, 1.2, 9.0), True, False), ((1.0,), False, True), ((1.31,), False, False)],
)
def test_a_figure_holds_its_median_against_its_target(values, at_least, met):
    assert Figure("f", values, "ratio", 1.3, at_least).met is met


def test_sides_take_turns_and_the_first_round_is_not_kept():
    order = []

    def side(name):
        return lambda: order.append(name) or float(len(order))

    values = bench.take_turns({"a": side("a"), "b": side("b")}, 2)
    assert "".join(order) == "ababab"
    assert values == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_seconds_are_those_of_the_statements_alone():
    assert 0.2 <= bench.seconds_in_a_fresh_process("time.sleep(0.2)", before="time.sleep(0.5)") < 0.5
    with pytest.raises(ValueError, match="No module named 'no_such_module'"):
        bench.seconds_in_a_fresh_process("import no_such_module")


def test_imports_are_read_from_the_notebooks_code(tmp_path):
    cells = [
        "%matplotlib inline\nimport math, json\nx = 1",
        "from os import path\nif x:\n    import csv",
        "import json",
    ]
    nbformat.write(new_notebook(cells=[new_code_cell(cell) for cell in cells]), tmp_path / "n.ipynb")
    expected = "import math, json\nfrom os import path\nimport json"
    assert bench.notebook_imports(tmp_path / "n.ipynb") == expected


@pytest.fixture
def figures(monkeypatch):
    """Two benches in place of the real ones: one target met, one missed."""
    good = Figure("fast", (2.0, 2.5, 3.0), "ratio", 1.3, at_least=True, note="7 and 3", params={"threads": 2})
    slow = Figure("slow", (9.0,), "s", 8.0)
    monkeypatch.setattr(bench, "BENCHES", {"one": lambda: iter([good]), "two": lambda: iter([slow])})
    return good, slow


@pytest.mark.parametrize("argv, code", [([], 0), (["--strict"], 1), (["--strict", "--only", "one"], 0)])
def test_a_miss_is_said_and_fails_only_under_strict(figures, argv, code, capsys):
    assert bench.main(argv) == code
    out = capsys.readouterr().out
    assert "2.5x" in out and "at least 1.3x" in out and "7 and 3" in out
    assert ("MISSED" in out) == ("--only" not in argv)
    assert f"1 of {1 if '--only' in argv else 2} targets met." in out


def test_figures_are_kept_with_spread_target_and_verdict(figures):
    bench.main([])
    fast, slow = Ledger().read()
    assert (fast.name, fast.value, fast.unit, fast.p10, fast.p90) == ("bench: fast", 2.5, "ratio", 2.0, 3.0)
    assert fast.params == {"threads": 2, "target": 1.3, "met": True}
    assert (slow.p10, slow.params["met"]) == (None, False)


def test_a_bench_that_cannot_run_fails_and_stops_no_other(figures, monkeypatch, capsys):
    def broken():
        raise ValueError("chapters: got no notebooks")
        yield

    monkeypatch.setitem(bench.BENCHES, "one", broken)
    assert bench.main([]) == 1
    printed = capsys.readouterr()
    assert "one: chapters: got no notebooks" in printed.err and "slow" in printed.out
