"""`python -m labkit run`: every chapter run headless from its notebook, and a report of how it went."""

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from labkit._paths import DATA, cache_dir
from labkit.cli.run_report import ChapterRun, runs_table, write_report

NOTEBOOKS = DATA.parent / "notebooks"


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register `run`."""
    parser = commands.add_parser(
        "run",
        help="run all notebooks headless, with a report of their figures and tables at the end",
        description="Run notebooks from first to last cell without a browser. The files are not written back.",
    )
    parser.add_argument(
        "chapters",
        nargs="*",
        help="chapters such as 01 or 01_bottleneck_analysis (default: all)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="limit of a cell (%(default)s s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="report file: .html, or .md for the table alone (default: a dated .html in the cache)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="keep the executed notebooks in this folder",
    )
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """Run, print a line a chapter and the table, write the report of all. Returns 1 if a chapter failed."""
    from labkit import _check

    chapters = find_chapters(args.chapters)
    output = args.output or cache_dir() / "reports" / f"run-{datetime.now():%Y%m%d-%H%M%S}.html"
    if output.suffix not in (".md", ".html"):
        raise ValueError(f"--output: got {output}; takes a file ending in .md or .html")
    _check.number("--timeout", args.timeout, 0.0)
    for folder in (output.parent, *filter(None, [args.save])):  # before the first chapter, not after the last
        folder.mkdir(parents=True, exist_ok=True)
    _check.require(not output.is_dir(), "--output", str(output), "a file, and this is a folder")
    runs: list[ChapterRun] = []
    for path in chapters:
        print(f"{path.stem} ...", flush=True)
        runs.append(run_notebook(path, cell_timeout_s=args.timeout, save_to=args.save))
        print(
            f"{path.stem}: {'ok' if runs[-1].ok else 'FAILED'} in {runs[-1].seconds:.1f} s",
            flush=True,
        )
    report = write_report(runs, output)
    print(f"\n{runs_table(runs).text()}\n\nReport: {report}")
    return 0 if all(run.ok for run in runs) else 1


def find_chapters(wanted: Sequence[str] = (), folder: Path | None = None) -> list[Path]:
    """Notebooks of `folder` (default: notebooks/), in order: all, or those that a number, a name or a file names."""
    folder = folder or NOTEBOOKS
    every = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not every:
        raise ValueError(f"chapters: got no notebooks in {folder}; takes a checkout of the project with notebooks/")
    if not wanted:
        return every
    found = []
    for name in wanted:
        stem = Path(name).name.removesuffix(".ipynb")
        number = stem.zfill(2) if stem.isdigit() else None
        matches = [p for p in every if p.stem == stem or (number and p.stem.startswith(f"{number}_"))]
        if not matches:
            raise ValueError(f"chapters: got {name!r}; takes any of {', '.join(p.stem for p in every)}, or its number")
        found += matches
    return list(dict.fromkeys(found))


def run_notebook(path: Path, *, cell_timeout_s: float = 600.0, save_to: Path | None = None) -> ChapterRun:
    """Execute a copy of the notebook in its own kernel, from the notebook's folder; the file stays as it is.

    Errors of a cell, a dead kernel and a cell that takes longer than `cell_timeout_s` come back in the result.
    Needs nbclient and ipykernel: ValueError names what to install.
    """
    try:
        import nbformat
        from jupyter_client.kernelspec import NoSuchKernel
        from nbclient import NotebookClient
        from nbclient.exceptions import CellControlSignal
    except ImportError as error:
        raise ValueError(f"run: {error.name} is not installed; takes `pip install -r requirements.txt`") from error
    try:
        notebook, reached = nbformat.read(path, as_version=4), [None]
        kernel = notebook.metadata.get("kernelspec", {}).get("name", "python3")
        _ = [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]
    except (ValueError, AttributeError, KeyError, TypeError, OSError) as error:  # the others run all the same
        return ChapterRun(path.stem, False, 0.0, error=f"it is not a notebook: {error}", traceback=str(error))
    client = NotebookClient(
        notebook,
        on_cell_execute=lambda cell, cell_index: reached.append(cell_index),
        timeout=cell_timeout_s,
        kernel_name=kernel,
        resources={"metadata": {"path": str(path.parent)}},
    )
    started = time.perf_counter()
    run = ChapterRun(path.stem, ok=True, seconds=0.0)
    with _peak_memory(lambda: getattr(getattr(client.km, "provisioner", None), "pid", None)) as peak:
        try:
            # The kernel's own folder is notebooks/: this checkout's labkit comes first, installed or not.
            paths = [str(DATA.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            client.execute(env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
        except Exception as error:
            # nbclient takes Ctrl-C for itself: it stops the kernel, and then fails over its being gone.
            if getattr(client, "_async_cleanup_kernel_future", None) is not None:
                raise KeyboardInterrupt from error
            if not isinstance(error, CellControlSignal | RuntimeError | NoSuchKernel):
                raise
            run = replace(run, ok=False, **_what_stopped_it(notebook, reached[-1], error))
    if save_to is not None:
        save_to.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, save_to / path.name)
    return replace(run, seconds=time.perf_counter() - started, peak_bytes=peak[0] or None, notebook=notebook)


def _what_stopped_it(notebook: object, reached: int | None, error: Exception) -> dict[str, object]:
    """The error, and the number among code cells of the cell `reached`."""
    name, says = (error.ename, error.evalue) if hasattr(error, "ename") else (type(error).__name__, error)
    number = None if reached is None else sum(c.cell_type == "code" for c in notebook.cells[: reached + 1])
    return {"cell": number, "error": f"{name}: {says}", "traceback": str(error)}


@contextmanager
def _peak_memory(pid_of: Callable[[], int | None], every_s: float = 0.1) -> Iterator[list[int]]:
    """Sample the resident memory of a process tree; the list's only item is the highest sum of bytes so far."""
    import psutil

    peak, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(every_s):
            pid = pid_of()
            try:
                tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)] if pid else []
                peak[0] = max(peak[0], sum(process.memory_info().rss for process in tree))
            except psutil.Error:  # the kernel or a child ended between listing and reading
                continue

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
