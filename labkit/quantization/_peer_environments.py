"""The other libraries that quantize, each with the environment that it needs and how that is had."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from labkit import _check
from labkit._paths import DATA

_RUNNERS = Path(__file__).parent / "_peer_runners"


@dataclass(frozen=True)
class Peer:
    """A library that quantizes.

    environment: its folder below the repository, "" for this one; `variable` names what overrides that. package: what
    is imported there. methods: what it is run with here. get: the command that installs it.
    """

    name: str
    title: str
    environment: str
    variable: str
    package: str
    runner: str
    methods: tuple[str, ...]
    maintained: bool
    about: str
    get: str = "make quantlibs"

    @property
    def folder(self) -> Path:
        """Of its environment, which need not be there."""
        if not self.environment:
            return Path(sys.prefix)
        found = os.environ.get(self.variable)
        # From the repository, as in the Makefile; an absolute path stays what it is.
        return DATA.parent / (Path(found).expanduser() if found else self.environment)

    @property
    def python(self) -> Path:
        """The interpreter that runs it."""
        return self.folder / "bin" / "python" if self.environment else Path(sys.executable)

    @property
    def script(self) -> Path:
        """What is run there."""
        return _RUNNERS / self.runner


OURS = Peer("labkit", "labkit", "", "", "labkit", "run_labkit.py", ("GPTQ", "AWQ"), True, "this course's own")
PEERS = (
    Peer(
        *("gptqmodel", "GPTQModel", ".venv-quantlibs", "LABKIT_QUANTLIBS", "gptqmodel", "run_gptqmodel.py"),
        *(("GPTQ", "AWQ"), True, "the successor of AutoGPTQ and AutoAWQ"),
    ),
    Peer(
        *("autogptq", "AutoGPTQ", ".venv-legacy", "LABKIT_LEGACY", "auto_gptq", "run_autogptq.py"),
        *(("GPTQ",), False, "GPTQModel is its successor"),
    ),
    Peer(
        *("autoawq", "AutoAWQ", ".venv-legacy", "LABKIT_LEGACY", "awq", "run_autoawq.py"),
        *(("AWQ",), False, "GPTQModel is its successor"),
    ),
)


def find(peer: Peer | str) -> Peer:
    """A peer by its name, such as "gptqmodel"; "labkit" is this package. Errors: ValueError for an unknown name."""
    if isinstance(peer, Peer):
        return peer
    names = {known.name: known for known in (OURS, *PEERS)}
    return names[_check.choice("peer", peer, list(names))]


def missing(peer: Peer | str) -> str | None:
    """Why a peer cannot be run here, with the command that installs it; None where it is installed."""
    peer = find(peer)
    if not peer.environment:
        return None
    if not peer.python.exists():
        return f"{peer.title} is not installed (no {peer.folder.name}): {peer.get} installs it"
    if not list(peer.folder.glob(f"lib/python*/site-packages/{peer.package}")):
        return f"{peer.folder.name} is there and {peer.title} is not in it: {peer.get} goes on from where it stopped"
    return None
