"""`python -m labkit run`: notebooks run headless, and every way in which one can fail is in the report."""

import os
import signal
import threading

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from labkit.__main__ import main
from labkit.cli import run
from labkit.cli.run import ChapterRun, find_chapters, run_notebook, runs_table, write_report

_KERNELSPEC = {"name": "python3", "display_name": "Python 3", "language": "python"}


def write(folder, name, *cells):
    """A notebook that opens with a markdown cell, so that code cells are not counted by all cells."""
    code = [new_code_cell(cell) for cell in cells]
    notebook = new_notebook(cells=[new_markdown_cell("# A title"), *code], metadata={"kernelspec": _KERNELSPEC})
    nbformat.write(notebook, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A notebooks/ folder of the test's own, and a cache."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "NOTEBOOKS", tmp_path / "notebooks")
    run.NOTEBOOKS.mkdir()
    return run.NOTEBOOKS


def test_a_run_ends_with_the_table_the_report_and_1_if_a_chapter_failed(folder, capsys, tmp_path):
    good = write(folder, "00_good", "import labkit", "print(labkit.__version__)")
    bad = write(folder, "01_bad", "x = 1", "raise KeyError('<no | such>')", "print('never')")
    before = good.read_bytes(), bad.read_bytes()
    assert main(["run", "--save", str(tmp_path / "executed")]) == 1
    out = capsys.readouterr().out
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith(("00_good  ", "01_bad  "))}
    assert " ok " in rows["00_good"] and " MB" in rows["00_good"]
    assert "FAILED" in rows["01_bad"] and "code cell 2: KeyError: '<no | such>'" in rows["01_bad"]
    (report,) = (tmp_path / "cache" / "reports").iterdir()
    page = report.read_text()
    assert report.suffix == ".html" and "\x1b[" not in page
    good_part, bad_part = page.split('id="chapter-')[1:]
    assert f'<pre class="text">{run_version()}\n</pre>' in good_part and "Traceback" not in good_part
    assert "Traceback" in bad_part and "FAILED: KeyError: &#x27;&lt;no | such&gt;&#x27;" in bad_part
    assert (good.read_bytes(), bad.read_bytes()) == before
    executed = nbformat.read(tmp_path / "executed" / "00_good.ipynb", as_version=4)
    assert executed.cells[2].outputs[0].text == f"{run_version()}\n"


def run_version():
    import labkit

    return labkit.__version__


def test_a_run_without_a_failure_returns_0_and_only_what_was_asked_for_runs(folder, capsys, tmp_path):
    write(folder, "00_good", "pass")
    write(folder, "01_bad", "1 / 0")
    assert main(["run", "0", "--output", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert page.startswith("<!doctype html>") and "00_good" in page and "01_bad" not in page


def test_markdown_holds_the_table_and_the_failures_for_those_who_ask(folder, tmp_path):
    write(folder, "00_good", "pass")
    write(folder, "01_bad", "raise KeyError('<no | such>')")
    assert main(["run", "--output", str(tmp_path / "r.md")]) == 1
    report = (tmp_path / "r.md").read_text()
    assert "## 01_bad" in report and "## 00_good" not in report and "\x1b[" not in report
    assert "KeyError" in report.split("## 01_bad")[1]


def test_a_cell_that_takes_too_long_is_named(folder):
    result = run_notebook(write(folder, "00_slow", "x = 1", "import time; time.sleep(60)"), cell_timeout_s=2)
    assert (result.ok, result.cell) == (False, 2)
    assert result.error.startswith("CellTimeoutError")
    assert result.seconds < 30


def test_a_kernel_that_dies_is_named(folder):
    result = run_notebook(write(folder, "00_dies", "import os; os._exit(3)"))
    assert (result.ok, result.cell) == (False, 1)
    assert result.error.startswith("DeadKernelError")


def test_a_cell_that_raises_on_purpose_is_not_the_error(folder):
    path = write(folder, "00_purpose", "1 / 0", "pass", "undefined")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].metadata.tags = ["raises-exception"]
    nbformat.write(notebook, path)
    result = run_notebook(path)
    assert (result.cell, result.error) == (3, "NameError: name 'undefined' is not defined")


def test_an_unknown_kernel_is_an_error_of_the_run(folder):
    path = write(folder, "00_kernel", "pass")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec.name = "no-such-kernel"
    nbformat.write(notebook, path)
    assert run_notebook(path).error.startswith("NoSuchKernel")


def test_peak_memory_counts_the_kernels_children_too(folder):
    hold = "import time; held = bytearray(b'1') * {mb} * 10**6; time.sleep(1)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold.format(mb=150)!r}])"
    plain = run_notebook(write(folder, "00_plain", "import time; time.sleep(1)"))
    own = run_notebook(write(folder, "01_own", hold.format(mb=150)))
    childs = run_notebook(write(folder, "02_child", child))
    assert 130e6 < own.peak_bytes - plain.peak_bytes < 220e6
    assert 130e6 < childs.peak_bytes - plain.peak_bytes < 220e6


def test_the_kernel_starts_in_the_notebooks_folder_with_this_labkit_first(folder):
    path = write(folder, "00_where", "import os, labkit; print(os.getcwd(), labkit.__file__)")
    run_notebook(path, save_to=folder / "out")
    cwd, file = nbformat.read(folder / "out" / path.name, as_version=4).cells[1].outputs[0].text.split()
    assert (cwd, file) == (str(folder), run.__file__.replace("cli/run.py", "__init__.py"))


def test_a_line_about_what_goes_on_is_plain_output_in_a_notebook(folder):
    path = write(folder, "00_says", "from labkit._progress import say; say('loading')")
    run_notebook(path, save_to=folder / "out")
    outputs = nbformat.read(folder / "out" / path.name, as_version=4).cells[1].outputs
    assert [(output.name, output.text) for output in outputs] == [("stdout", "loading\n")]


@pytest.mark.parametrize("name", ["1", "01", "01_second", "notebooks/01_second.ipynb"])
def test_a_chapter_can_be_named_in_several_ways(folder, name):
    for stem in ("00_first", "01_second", "10_tenth"):
        write(folder, stem, "pass")
    write(folder, "scratch", "pass")
    assert [path.stem for path in find_chapters([name])] == ["01_second"]
    assert [path.stem for path in find_chapters([name, "0", name])] == ["01_second", "00_first"]
    assert [path.stem for path in find_chapters()] == ["00_first", "01_second", "10_tenth"]


@pytest.mark.parametrize(
    "argv, says",
    [
        (["run", "77"], "chapters: got '77'; takes any of 00_first, or its number"),
        (["run", "0.5"], "chapters: got '0.5'; takes any of 00_first, or its number"),
        (["run", "--output", "report.pdf"], "--output: got report.pdf; takes a file ending in .md or .html"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(folder, argv, says, capsys, monkeypatch):
    write(folder, "00_first", "pass")
    monkeypatch.setattr(run, "run_notebook", lambda *_, **__: pytest.fail("it ran"))
    assert main(argv) == 2
    assert capsys.readouterr().err == f"labkit: {says}\n"


def test_a_folder_without_notebooks_says_what_it_takes(folder, capsys):
    assert main(["run"]) == 2
    assert "takes a checkout of the project" in capsys.readouterr().err


def test_a_report_shows_markup_as_text(tmp_path):
    failed = ChapterRun("00_x", False, 1.0, None, 3, "ValueError: <b>|</b>\nmore", "trace <i>")
    assert runs_table([failed]).rows[0][2:] == ("1.0", "not read", "code cell 3: ValueError: <b>|</b> more")
    page = write_report([failed], tmp_path / "r.html").read_text()
    assert "<b>" not in page and "<i>" not in page and "trace &lt;i&gt;" in page


def test_what_cannot_be_written_is_refused_before_the_first_chapter(folder, tmp_path, capsys):
    write(folder, "00_good", "pass")
    (tmp_path / "a_file").write_text("")
    for flags in (["--save", "a_file"], ["--output", "a_file/r.md"], ["--timeout", "nan"]):
        assert main(["run", flags[0], flags[1].replace("a_file", str(tmp_path / "a_file"))]) == 2
    assert "00_good" not in capsys.readouterr().out


def test_a_file_that_is_no_notebook_fails_alone(folder, capsys):
    (folder / "00_broken.ipynb").write_text("{")
    write(folder, "01_good", "pass")
    assert main(["run"]) == 1
    out = capsys.readouterr().out
    assert "00_broken: FAILED" in out and "it is not a notebook" in out and "01_good: ok" in out


def test_ctrl_c_in_the_middle_of_a_chapter_says_that_it_stopped(folder, capsys, tmp_path):
    started = tmp_path / "started"
    write(folder, "00_long", f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(60)")

    done = threading.Event()

    def press() -> None:
        while not started.exists():
            if done.wait(0.05):
                return
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press)
    presses.start()
    try:
        assert main(["run"]) == 130
    finally:
        done.set()
        presses.join()
    assert capsys.readouterr().err == "labkit: stopped\n"
