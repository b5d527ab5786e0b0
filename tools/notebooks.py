"""`make notebooks`: run every notebook and keep its outputs in the form that the repository holds."""

import argparse
import copy
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from labkit._paths import DATA, cache_dir
from labkit.cli.run import find_chapters, run_notebook
from tools.notebook_rules import WIDGET_VIEW, violations

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"}
# What an editor or a run leaves behind; tags and attachments are the author's and stay.
_CELL_METADATA_KEPT = ("tags", "jupyter", "editable", "deletable")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the notebooks named (default: all) and write them back; 1 if one failed or breaks a rule."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=__doc__)
    parser.add_argument("chapters", nargs="*", help="chapters such as 01 (default: all)")
    parser.add_argument("--no-run", action="store_true", help="normalise what is there, without running it")
    args = parser.parse_args(argv)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        # The measurements of these runs stand in the outputs; the user's own ledger is not the place for them.
        os.environ["LABKIT_LEDGER"] = str(Path(folder) / "ledger.jsonl")
        for path in find_chapters(args.chapters):
            problems = refresh(path, run=not args.no_run)
            failed |= bool(problems)
            print(f"{path.name}: {'; '.join(problems) or 'written'}", flush=True)
    return int(failed)


def refresh(path: Path, *, run: bool = True) -> list[str]:
    """Run a notebook and write it back, normalised. Returns what is wrong: after an error nothing is written;
    a broken rule is written all the same, since a change to the text mends it."""
    with tempfile.TemporaryDirectory() as folder:
        if run:
            result = run_notebook(path, save_to=Path(folder))
            print(f"{path.name}: {result.seconds:.1f} s, {(result.peak_bytes or 0) / 1e9:.2f} GB", flush=True)
            if not result.ok:
                return [f"not written: code cell {result.cell}: {result.error}"]
        source = Path(folder) / path.name if run else path
        notebook = normalise(nbformat.read(source, as_version=4))
    fresh = path.with_suffix(".ipynb.tmp")
    nbformat.write(notebook, fresh)
    fresh.replace(path)
    return violations(notebook, path.stem)


def normalise(notebook: NotebookNode) -> NotebookNode:
    """A copy that says the same on every machine: counts 1…n, no widget state, no timing, no path of this machine.

    Cell ids stay as they are, so that a rerun changes only what it measured.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNELSPEC), language_info=NotebookNode(LANGUAGE))
    count = 0
    for cell in notebook.cells:
        cell.metadata = NotebookNode({key: cell.metadata[key] for key in _CELL_METADATA_KEPT if key in cell.metadata})
        if cell.cell_type != "code":
            continue
        count += bool(cell.source.strip())
        cell.execution_count = count if cell.source.strip() else None
        cell.outputs = [clean for clean in map(_clean_output, _join_streams(cell.outputs)) if clean is not None]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
    return notebook


def _join_streams(outputs: Sequence[NotebookNode]) -> list[NotebookNode]:
    """One output a stream, in the place of its first piece, as nbval joins them before it compares."""
    joined, streams = [], {}
    for output in outputs:
        if output.output_type != "stream":
            joined.append(output)
        elif output.name in streams:
            streams[output.name].text += output.text
        else:
            joined.append(streams.setdefault(output.name, output))
    for stream in streams.values():
        # A progress bar rewrites its line: what was last written is what was seen.
        stream.text = re.sub(r"[^\n]*\r(?!\n)", "", stream.text)
    return joined


def _clean_output(output: NotebookNode) -> NotebookNode | None:
    """An output without its live widget and without paths; None if nothing is left of it."""
    if "data" in output:
        output.data.pop(WIDGET_VIEW, None)
        if not output.data:
            return None
        output.metadata = NotebookNode()
    return _map_strings(output, without_paths)


def _map_strings(value: object, change: Callable[[str], str]) -> object:
    """`value` with every string in it changed, images excepted."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        pairs = ((k, v if str(k).startswith("image/p") else _map_strings(v, change)) for k, v in value.items())
        return type(value)(pairs)
    if isinstance(value, list):
        return [_map_strings(item, change) for item in value]
    return value


def without_paths(text: str) -> str:
    """`text` with this machine's folders named as any reader would know them."""
    text = re.sub(r"\S*ipykernel_\d+/\d+\.py", "cell", text)
    for folder, name in sorted(_folders().items(), key=lambda item: -len(item[0])):
        text = re.sub(re.escape(folder) + r"(?=[/\s\"'<)\]:;,]|$)", lambda _, name=name: name, text)
    return text


def _folders() -> dict[str, str]:
    return {
        str(DATA.parent): ".",
        str(cache_dir().resolve()): "~/.cache/labkit",
        str(cache_dir()): "~/.cache/labkit",
        sys.prefix: ".venv",
        sys.base_prefix: "python",
        str(Path.home()): "~",
        tempfile.gettempdir(): "tmp",
    }


if __name__ == "__main__":
    sys.exit(main())
