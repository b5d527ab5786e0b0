"""`python -m labkit gpu-check`: what a GPU machine must show, in at most six minutes, from torch and pytest alone.

Each section runs in a process of its own with its own time-out, and the results are written after each, so that a
crash, a hang or a machine taken away costs one section. Sections and how to add one: `labkit/cli/gpu_sections`.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from labkit._paths import cache_dir
from labkit.cli import gpu_results
from labkit.cli.gpu_sections import SECTIONS, Section
from labkit.cli.table import Table

LIMIT_S = 360.0
_NO_GPU = "gpu-check: no CUDA GPU here, so there is nothing to check; --allow-cpu tests the sections themselves."
_KEPT_CHARS = 4000
# A CPU interprets the kernels, and its neighbours are at work: there the limit of a section is this much longer.
_PATIENCE = 3


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register `gpu-check`."""
    parser = commands.add_parser(
        "gpu-check",
        help="run the GPU tests and measure the engine on a CUDA machine",
        description="Run every section, each in its own process, and write JSON as it goes. "
        "Ends with 0, with 1 if a section failed, with 2 if there is no GPU. "
        "SECTION=a,b chooses sections; OUT=FOLDER puts the file there.",
    )
    parser.add_argument("--section", action="append", metavar="NAME", help="run this section alone (may be repeated)")
    parser.add_argument("--output", type=Path, help="result file (default: data/gpu_results/<date>-<chip>.json)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for all (default: %(default)s)"
    )
    parser.add_argument(
        "--allow-cpu", action="store_true", help="without a GPU, run the sections at tiny shapes to test them"
    )
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """Run the chosen sections and print what came out."""
    import torch

    chosen = choose(args.section or [name for name in os.environ.get("SECTION", "").split(",") if name])
    cuda = torch.cuda.is_available()
    if not cuda and not args.allow_cpu:
        print(_NO_GPU, file=sys.stderr)
        return 2
    chip = torch.cuda.get_device_name() if cuda else "cpu"
    path = args.output or default_output(chip, cuda)
    if not cuda and gpu_results.RESULTS in path.resolve().parents:
        raise ValueError(f"--output: got {path}; takes a file outside {gpu_results.RESULTS} for a self-test on a CPU")
    if not cuda:
        chosen = [replace(section, timeout_s=_PATIENCE * section.timeout_s) for section in chosen]
    run = run_sections(chosen, path, chip=chip, kind="cuda" if cuda else "cpu", limit_s=args.limit)
    print("\n" + summary(run, [section.name for section in chosen]) + f"\n\nWritten to {path}")
    return 0 if all(run["sections"][section.name]["status"] == "ok" for section in chosen) else 1


def choose(names: Sequence[str]) -> list[Section]:
    """The sections of these names in their own order; all for none."""
    from labkit import _check

    every = {section.name: section for section in SECTIONS}
    for name in names:
        _check.choice("section", name, list(every))
    return [section for name, section in every.items() if not names or name in names]


def default_output(chip: str, cuda: bool) -> Path:
    """`<date>-<chip>.json` in OUT or in data/gpu_results; a CPU's self-test goes to OUT or the cache, named as such."""
    out = os.environ.get("OUT")
    slug = re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-")
    if cuda:
        return Path(out or gpu_results.RESULTS) / f"{datetime.now(UTC):%Y-%m-%d}-{slug}.json"
    return Path(out or cache_dir()) / "gpu-check-selftest-cpu.json"


def run_sections(chosen: Iterable[Section], path: Path, *, chip: str, kind: str, limit_s: float = LIMIT_S) -> dict:
    """Run one after the other, writing `path` after each; returns what stands in it.

    A file of the same kind and chip that is already there keeps its other sections, so that one section can be run
    again alone. What no time is left for is written down as not run.
    """
    run = {
        "label": gpu_results.RECORDED if kind == "cuda" else gpu_results.SELF_TEST,
        "kind": kind,
        "chip": chip,
        "sections": _kept_sections(path, kind, chip),
    }
    gpu_results.write_atomically(path, run)
    deadline = time.monotonic() + limit_s
    for section in chosen:
        left = min(section.timeout_s, deadline - time.monotonic())
        if left > 1:
            print(f"{section.name} (at most {left:.0f} s)", flush=True)
            run["sections"][section.name] = run_section(section, kind=kind, timeout_s=left)
        else:
            run["sections"][section.name] = {"status": "not run", "says": f"the {limit_s:g} s were used up"}
        result = run["sections"][section.name]
        print(f"{section.name}: {result['status']}", flush=True)
        gpu_results.write_atomically(path, run)
    return run


def _kept_sections(path: Path, kind: str, chip: str) -> dict[str, dict]:
    if not path.is_file():
        return {}
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        there = None
    if not isinstance(there, dict) or not isinstance(there.get("sections"), dict):
        raise ValueError(f"--output: got {path}, which gpu-check did not write; takes another file")
    if (there.get("kind"), there.get("chip")) != (kind, chip):
        raise ValueError(f"--output: got {path}, which holds a run on {there.get('chip')}; takes another file")
    return there["sections"]


def run_section(section: Section, *, kind: str, timeout_s: float) -> dict:
    """One section in its own process: status, seconds, results, targets, sources' hashes, and the end of its errors."""
    hashes = gpu_results.source_hashes(section.sources)
    command = [sys.executable, "-m", "labkit.cli.gpu_sections", section.measure]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        partial, errors = Path(folder) / "section.json", Path(folder) / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*command, str(partial), "cuda" if kind == "cuda" else "cpu"],
                stderr=stderr,
                cwd=gpu_results.ROOT,
                start_new_session=True,  # a time-out ends what the section started, too
            )
            status = _wait(process, timeout_s)
        found = json.loads(partial.read_text(encoding="utf-8")) if partial.is_file() else {}
        says = "" if status == "ok" else errors.read_text(encoding="utf-8", errors="replace")[-_KEPT_CHARS:]
    return {
        "status": status,
        "seconds": round(time.monotonic() - started, 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": gpu_results.commit(),
        "results": found.get("results", {}),
        "targets": found.get("targets", []),
        "sources": hashes,
        "says": says,
    }


def _wait(process: subprocess.Popen, timeout_s: float) -> str:
    """Status "ok", "failed (exit code)" or "timed out"; in the end nothing of the process's group is left."""
    try:
        code = process.wait(timeout_s)
        return "ok" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def summary(run: dict, names: Sequence[str]) -> str:
    """The sections, then the targets, as text; a self-test says first that it is one."""
    rows = []
    for name in names:
        result = run["sections"][name]
        last = (result.get("says") or "").strip().splitlines()[-1:] or [""]
        rows.append(
            {"section": name, "status": result["status"], "seconds": result.get("seconds"), "says": last[0][:90]}
        )
    lines = [f"{run['label']}: {run['chip']}", "", Table.of(rows, ("section", "status", "seconds", "says")).text()]
    targets = [
        {**target, "section": name, "value": f"{target['value']:.3f}", "met": "met" if target["met"] else "MISSED"}
        for name in names
        for target in run["sections"][name].get("targets", [])
    ]
    if targets:
        lines += ["", Table.of(targets, ("section", "name", "value", "at_least", "met")).text()]
    return "\n".join(lines)
