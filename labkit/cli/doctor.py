"""`python -m labkit doctor`: an instructor's pre-flight of the machine that the course will run on."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby

from labkit.cli import checks
from labkit.cli.checks import Finding, Status


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Register `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help="is this machine ready? device, libraries, model, disk, ceilings",
        description="Check this machine before a workshop. Ends with 0 when every chapter can run, else with 1.",
    )
    parser.add_argument("--quick", action="store_true", help="do not measure the ceilings")
    parser.add_argument("--device", help="cpu, cuda or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.set_defaults(run=command)


def command(args: argparse.Namespace) -> int:
    """Run every check, print, and return 0 if none failed, else 1."""
    findings = examine(device=args.device, quick=args.quick)
    ready = all(finding.status is not Status.FAIL for finding in findings)
    if args.json:
        print(json.dumps({"ready": ready, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(render(findings))
    return 0 if ready else 1


def examine(*, device: str | None = None, quick: bool = False) -> list[Finding]:
    """All findings, in the order of the report; without torch only what can be said without it."""
    findings = [*checks.python(), *checks.libraries()]
    if not any(finding.status is Status.FAIL and finding.topic == "libraries" for finding in findings):
        findings += [*checks.machine(device), *checks.threads(), *checks.backends()]
        findings += [*checks.default_model(), *checks.notebooks()]
        if not quick:
            findings += checks.ceilings(device)
    return findings + list(checks.disk())


def render(findings: Iterable[Finding]) -> str:
    """Lines by topic, each with its verdict and, where something is to be done, what; then the verdict of the whole."""
    findings = list(findings)
    lines = []
    for topic, group in groupby(findings, key=lambda finding: finding.topic):
        lines.append(topic)
        for finding in group:
            lines.append(f"  {finding.status:<4}  {finding.says}")
            if finding.advice:
                lines.append(f"        -> {finding.advice}")
    failed = [finding for finding in findings if finding.status is Status.FAIL]
    lines.append("")
    if failed:
        lines.append(f"Not ready: {len(failed)} of {len(findings)} checks failed.")
        lines += [f"  FAIL  {finding.topic}: {finding.says}" for finding in failed]
    else:
        notes = sum(finding.status is Status.NOTE for finding in findings)
        lines.append(f"Ready: {len(findings)} checks, none failed" + (f", {notes} to note." if notes else "."))
    return "\n".join(lines)
