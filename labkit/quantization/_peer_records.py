"""Runs of other libraries: one made here, those recorded in `data/recorded/peers.json`, and the table of both."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit._paths import DATA
from labkit._table import Table, readable
from labkit.quantization._peer_environments import OURS, PEERS, Peer, find, missing

RECORDED = DATA / "recorded" / "peers.json"
_COLUMNS = ("library", "maintained", "method", "settings", "perplexity", "float", "time", "bytes", "where", "here")


@dataclass(frozen=True, kw_only=True)
class PeerResult:
    """One run. perplexity: of the checkpoint that the library wrote, dequantized into the float model and measured by
    `labkit.quality`, the same for all; baseline: the float model's. seconds: quantizing alone, without loading and
    saving. nbytes: the quantized matrices as stored. dtype: what the library computed in. versions: the library's,
    torch's and transformers'. model: its name.
    """

    peer: str
    method: str
    bits: int
    group_size: int
    sym: bool
    desc_act: bool
    damp_percent: float
    dtype: str
    perplexity: float
    baseline: float
    seconds: float
    nbytes: int
    threads: int
    device: str
    model: str
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def version(self) -> str:
        """The library's own, the first that its runner names."""
        return next(iter(self.versions.values()), "")

    def where(self) -> str:
        """The label of a figure, and what is known of where it comes from."""
        return "MEASURED here"

    def row(self) -> tuple[str, ...]:
        """The cells of `peers_table` but the last."""
        peer = find(self.peer)
        order = ", act-order" if self.desc_act else ""
        kind = "symmetric" if self.sym else "asymmetric"
        settings = f"{self.model}, {self.bits} bits, g{self.group_size}, {kind}{order}, {self.dtype}"
        return (
            f"{peer.title} {self.version}".strip(),
            _maintained(peer),
            self.method,
            settings,
            f"{self.perplexity:.2f}",
            f"{self.baseline:.2f}",
            readable(self.seconds, "s"),
            readable(self.nbytes, "bytes"),
            "; ".join((self.where(), *self.notes)),
        )


@dataclass(frozen=True, kw_only=True)
class RecordedPeer(PeerResult):
    """A run of this project, with the machine, date and commit of it."""

    machine: str
    date: str
    commit: str
    calibration: str
    evaluation: str

    def where(self) -> str:
        """RECORDED, with the machine, date and commit; versions stand elsewhere."""
        commit = f"commit {self.commit[:7]}{' and changes' if self.commit.endswith('+') else ''}"
        return f"RECORDED {self.date}, {self.machine.partition(', torch')[0]}, {commit}"


@functools.cache
def recorded_peers(path: Path = RECORDED) -> tuple[RecordedPeer, ...]:
    """All recorded runs, this package's own among them; none where there is no such file."""
    if not path.exists():
        return ()
    found = json.loads(path.read_text(encoding="utf-8"))
    runs = (found["common"] | run for run in found["runs"])
    return tuple(RecordedPeer(**run | {"notes": tuple(run.get("notes", ()))}) for run in runs)


def _maintained(peer: Peer) -> str:
    return "yes" if peer.maintained else f"no: {peer.about}"


def peers_table(live: Iterable[PeerResult] = (), *, recorded: Iterable[RecordedPeer] | None = None) -> Table:
    """This package and each peer: what was recorded, what `run_peer` measured just now (`live`), and whether the
    library is installed here; for one that is not, how to get it.

    recorded: None for `recorded_peers()`.
    """
    runs = [*(recorded_peers() if recorded is None else recorded), *live]
    rows = []
    for peer in (OURS, *PEERS):
        here = missing(peer) or "installed"
        own = [run.row() for run in runs if run.peer == peer.name]
        nothing = ((peer.title, _maintained(peer), ", ".join(peer.methods), *("",) * 5, "not recorded"),)
        rows += [(*row, here) for row in own or nothing]
    return Table(_COLUMNS, tuple(rows))
