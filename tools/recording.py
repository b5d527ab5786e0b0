"""What a recorded figure carries with it: the machine, the date and the commit."""

import datetime
import subprocess

from labkit._paths import DATA
from labkit.hardware import describe
from labkit.ledger import library_versions
from labkit.measure import device_name


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=DATA.parent).stdout.strip()


def short_commit() -> str:
    """The commit that is checked out, with a plus where code differs from it; "unknown" outside a checkout."""
    changed = _git("status", "--porcelain", "--", "labkit", "tools")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def machine(threads: int) -> dict[str, str]:
    """Device, thread count, library versions and today's date."""
    known = describe("cpu")
    versions = library_versions()
    shown = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions)
    where = f"{device_name('cpu')}, {threads} of {known.cores} cores, {shown}"
    return {"machine": where, "date": datetime.date.today().isoformat()}
