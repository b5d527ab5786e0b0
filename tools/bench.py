"""`make bench`: the speeds and sizes that the course promises, measured here, each beside its target.

A ratio comes from one run in which its sides take turns; a figure is a median. Each goes into the ledger. A miss is
said, and changes the exit code only under `--strict`: a busy machine must not fail a build. GPU figures come from
`make gpu-check`.
"""

import argparse
import ast
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from labkit._paths import DATA
from labkit.cli.run import find_chapters, run_notebook
from labkit.cli.table import Table, readable
from tools.bench_figure import Figure, take_turns

if TYPE_CHECKING:
    from labkit.engine import Decoder

_PROMPT_TOKENS, _NEW_TOKENS = 32, 32


def seconds_in_a_fresh_process(statements: str, *, before: str = "") -> float:
    """Seconds that `statements` take in a new interpreter, after `before`; its own start is not counted.

    Errors: ValueError with the end of what the process said, if it failed.
    """
    clocked = f"import time\n{before}\nbegin = time.perf_counter()\n{statements}\nprint(time.perf_counter() - begin)"
    done = subprocess.run([sys.executable, "-c", clocked], capture_output=True, text=True, cwd=DATA.parent)
    if done.returncode:
        raise ValueError(f"statements: got {statements!r}, which failed: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout.strip().splitlines()[-1])


def notebook_imports(path: Path) -> str:
    """Every import statement at the top level of a notebook's code cells, in order."""
    import nbformat

    found = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            # Jupyter's own lines (%magic, !command) are no Python.
            lines = [line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!"))]
            nodes = ast.parse("\n".join(lines)).body
            found += [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(dict.fromkeys(found))


def imports() -> Iterator[Figure]:
    """What it costs to import the package, and what chapter 01 imports."""
    package = take_turns({"s": lambda: seconds_in_a_fresh_process("import labkit")}, 5)
    yield Figure("import labkit", tuple(package["s"]), "s", 0.3)
    statements = notebook_imports(find_chapters(["01"])[0])
    chapter = take_turns({"s": lambda: seconds_in_a_fresh_process(statements)}, 3)
    yield Figure("imports of chapter 01", tuple(chapter["s"]), "s", 6.0)


def loading() -> Iterator[Figure]:
    """Loading the default model from the cache."""
    load = "from labkit.models import load_model"
    values = take_turns({"s": lambda: seconds_in_a_fresh_process("load_model(device='cpu')", before=load)}, 3)
    yield Figure("load_model of the default model", tuple(values["s"]), "s", 8.0)


def decoding() -> Iterator[Figure]:
    """`Decoder` against `transformers.generate`, and its step's read bandwidth against the measured ceiling."""
    import torch

    from labkit.engine import Decoder
    from labkit.hardware import set_threads
    from labkit.models import load_model

    loaded = load_model(device="cpu", dtype=torch.float32)
    params = {"threads": set_threads(), "prompt_tokens": _PROMPT_TOKENS, "new_tokens": _NEW_TOKENS, "dtype": "float32"}
    vocab = loaded.model.config.vocab_size
    prompt = torch.randint(vocab, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    decoder = Decoder(loaded)

    def ours() -> float:
        begin = time.perf_counter()
        decoder.generate(prompt, max_new_tokens=_NEW_TOKENS)
        return _NEW_TOKENS / (time.perf_counter() - begin)

    def theirs() -> float:
        begin = time.perf_counter()
        asked = {"max_new_tokens": _NEW_TOKENS, "min_new_tokens": _NEW_TOKENS, "do_sample": False}
        loaded.model.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
        return _NEW_TOKENS / (time.perf_counter() - begin)

    turns = take_turns({"ours": ours, "theirs": theirs}, 4)
    ratios = [a / b for a, b in zip(turns["ours"], turns["theirs"], strict=True)]
    rates = [statistics.median(turns[side]) for side in ("ours", "theirs")]
    note = f"{rates[0]:.1f} and {rates[1]:.1f} tokens/s, {params['threads']} threads"
    yield Figure("Decoder over transformers.generate", tuple(ratios), "ratio", 1.3, True, note, params)
    yield _bandwidth_reached(decoder, params)


def _bandwidth_reached(decoder: "Decoder", params: dict[str, object]) -> Figure:
    """Bytes that a decode step moves over its time, against the read ceiling, the two measured in turns."""
    import torch

    from labkit.hardware import measure_ceilings
    from labkit.measure import time_op
    from labkit.roofline import op_costs

    token = torch.zeros(1, 1, dtype=torch.long)
    decoder.fill_cache(1, _PROMPT_TOKENS)

    def step() -> None:
        decoder.forward(token, logits_to_keep=1)
        decoder.crop(_PROMPT_TOKENS)

    sides = {
        "step": lambda: time_op(step, device="cpu", min_run_s=0.3, warmup=1).median,
        "ceiling": lambda: measure_ceilings("cpu", refresh=True).read_bandwidth,
    }
    turns = take_turns(sides, 4)
    costs = op_costs(decoder.model.config, batch=1, q_len=1, kv_len=_PROMPT_TOKENS + 1, dtype=torch.float32)
    moved = sum(cost.bytes for cost in costs)
    shares = [moved / seconds / top for seconds, top in zip(turns["step"], turns["ceiling"], strict=True)]
    step_s, top = (statistics.median(turns[side]) for side in ("step", "ceiling"))
    note = f"{readable(moved, 'bytes')} in {1e3 * step_s:.1f} ms, ceiling {readable(top, 'bytes/s')}"
    return Figure("decode step over read bandwidth", tuple(shares), "fraction", 0.6, True, note, params)


def chapter() -> Iterator[Figure]:
    """The whole of chapter 01, run headless."""
    run = run_notebook(find_chapters(["01"])[0])
    if not run.ok:
        raise ValueError(f"chapter 01: stopped at code cell {run.cell}: {run.error}")
    yield Figure("chapter 01, Run All", (run.seconds,), "s", 90.0)
    yield Figure("chapter 01, peak memory", (float(run.peak_bytes),), "bytes", 4e9)


def quantization() -> Iterator[Figure]:
    """Perplexity by method and bits, and the time of GPTQ: some ten minutes."""
    from tools import bench_quantization

    yield from bench_quantization.quality()


def int4() -> Iterator[Figure]:
    """Decoding with 4-bit weights."""
    from tools import bench_quantization

    yield from bench_quantization.speed()


def qat() -> Iterator[Figure]:
    """Quantization-aware training: over ten minutes."""
    from tools import bench_quantization

    yield from bench_quantization.training()


def speculation() -> Iterator[Figure]:
    """Tokens a target call and speed of each proposer, on held-out prompts."""
    from tools import bench_speculation

    yield from bench_speculation.speculation()


BENCHES: dict[str, Callable[[], Iterator[Figure]]] = {
    "imports": imports,
    "loading": loading,
    "decoding": decoding,
    "chapter": chapter,
    "quantization": quantization,
    "int4": int4,
    "qat": qat,
    "speculation": speculation,
}


def keep(figure: Figure) -> Figure:
    """Append the figure to the ledger; returns it."""
    from labkit.measure import Ledger, Measurement, Timing

    spread = Timing.of(list(figure.values)) if len(figure.values) > 1 else None
    params = figure.params | {"target": figure.target, "met": figure.met}
    name = f"bench: {figure.name}"
    Ledger().append(Measurement.of(name, figure.value, figure.unit, device="cpu", spread=spread, params=params))
    return figure


def figures_table(figures: Iterable[Figure]) -> Table:
    """A row a figure."""
    rows = []
    for figure in figures:
        bound = "at least" if figure.at_least else "at most"
        rows.append(
            {
                "figure": figure.name,
                "value": readable(figure.value, figure.unit),
                "target": f"{bound} {readable(figure.target, figure.unit)}",
                "verdict": "met" if figure.met else "MISSED",
                "note": figure.note,
            }
        )
    return Table.of(rows, ("figure", "value", "target", "verdict", "note"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benches, print and keep their figures. Returns 1 on an error and, under `--strict`, on a miss."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=BENCHES, help="run this one alone (may be repeated)")
    parser.add_argument("--strict", action="store_true", help="end with 1 if a target is missed")
    args = parser.parse_args(argv)
    figures, failed = [], False
    for name in args.only or BENCHES:
        print(f"{name} ...", flush=True)
        try:
            figures += [keep(figure) for figure in BENCHES[name]()]
        except ValueError as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
    missed = [figure for figure in figures if not figure.met]
    print(f"\n{figures_table(figures).text()}\n\n{len(figures) - len(missed)} of {len(figures)} targets met.")
    return 1 if failed or (args.strict and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
