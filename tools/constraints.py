"""`make constraints`: write constraints.txt, the exact versions of what requirements.txt brings along."""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_HEADER = """\
# The exact versions of what requirements.txt brings along, so that the same install works next year.
# pip reads them as limits (-c in requirements.txt), and installs of them only what something needs.
# `make constraints` writes this file. CUDA's own libraries are not here: torch pins them.
"""
# Of torch with CUDA only; and what is not the course's own.
_LEFT_OUT = re.compile(r"(nvidia-|cuda-|labkit$|pip$)")


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(path: Path) -> dict[str, str]:
    """Name to version of every `name==version` line of a requirements file."""
    lines = re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {canonical(name): version for name, version in lines}


def main() -> int:
    """Write the file from the environment that runs this."""
    direct = pinned(ROOT / "requirements.txt")
    installed = {canonical(d.metadata["Name"]): d.version.split("+")[0] for d in distributions()}
    kept = sorted(name for name in installed if name not in direct and not _LEFT_OUT.match(name))
    lines = "".join(f"{name}=={installed[name]}\n" for name in kept)
    (ROOT / "constraints.txt").write_text(_HEADER + lines, encoding="utf-8")
    print(f"constraints.txt: {len(kept)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
