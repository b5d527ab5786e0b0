"""`make record-peers`: GPTQModel, AutoGPTQ and AutoAWQ beside this package, which chapter 02 shows as RECORDED.

Needs what `make quantlibs` installs. Writes `data/recorded/peers.json` after each run, and goes on where it stopped;
about an hour on two cores. `--collect NAME FOLDER` records a run that was made before and whose folder was kept.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from labkit.corpora import load_text, token_batches
from labkit.models import DEFAULT_MODEL, LoadedModel, load_model
from labkit.quantization._peer_process import cores
from labkit.quantization._peer_records import RECORDED
from labkit.quantization.peers import OURS, PEERS, PeerResult, collect, missing, run_peer
from tools.recording import machine, short_commit

SAMPLES, LENGTH, WINDOWS = 32, 512, 6
_KEYS = ("peer", "method", "bits", "group_size", "sym", "desc_act")
# AWQ of the others takes half an hour on two cores that compute in bfloat16, many hours on others.
_HOURS = 5.0


def settings() -> Iterator[dict[str, object]]:
    """Every run; those of one method come one after the other, this package's first."""
    common = {"bits": 4, "group_size": 64, "sym": False}
    for method, names in (("GPTQ", ("labkit", "gptqmodel", "autogptq")), ("AWQ", ("labkit", "gptqmodel", "autoawq"))):
        for name in names:
            yield {"peer": name, "method": method, **common, "desc_act": method == "GPTQ"}


class Recorder:
    """The model, its texts, and the runs so far."""

    def __init__(self) -> None:
        self.threads = cores()
        torch.set_num_threads(self.threads)
        self.provenance = machine(self.threads) | {"commit": short_commit()}
        self.runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"] if RECORDED.exists() else []

    @functools.cached_property
    def loaded(self) -> LoadedModel:
        """The default model in float32."""
        return load_model(device="cpu", dtype=torch.float32)

    @functools.cached_property
    def calibration(self) -> torch.Tensor:
        """Token ids `(SAMPLES, LENGTH)`, those of `make record`."""
        return token_batches(self.loaded.tokenizer, load_text("pydoc", "calibration"), SAMPLES, LENGTH, seed=0)

    @functools.cached_property
    def evaluation(self) -> torch.Tensor:
        """Token ids `(WINDOWS, LENGTH)`, those of `make record`."""
        ids = self.loaded.tokenizer(load_text("pydoc", "eval"), add_special_tokens=False, verbose=False).input_ids
        return torch.tensor(ids)[: WINDOWS * LENGTH].view(WINDOWS, LENGTH)

    def run(self, setting: Mapping[str, object]) -> dict[str, object]:
        """One run of one library."""
        options = {name: value for name, value in setting.items() if name != "peer"}
        options |= {"threads": self.threads, "timeout_s": 3600 * _HOURS}
        return self._entry(run_peer(setting["peer"], self.loaded, self.calibration, self.evaluation, **options))

    def collect(self, name: str, folder: Path, note: str) -> dict[str, object]:
        """A run of which a folder was kept."""
        result = collect(name, self.loaded, self.evaluation, folder)
        return self._entry(dataclasses.replace(result, notes=(*result.notes, *filter(None, [note]))))

    def _entry(self, result: PeerResult) -> dict[str, object]:
        found = dataclasses.asdict(result) | self.provenance
        rounded = {"perplexity": 4, "baseline": 4, "seconds": 1}
        found |= {name: round(found[name], digits) for name, digits in rounded.items()}
        return {name: value for name, value in found.items() if name != "model"}

    def add(self, entry: Mapping[str, object]) -> None:
        """Kept in the place of an earlier run of the same setting, and written."""
        key = [entry[name] for name in _KEYS]
        self.runs = [run for run in self.runs if [run[name] for name in _KEYS] != key] + [dict(entry)]
        common = {
            "model": DEFAULT_MODEL,
            "calibration": f"{SAMPLES} x {LENGTH} tokens of pydoc",
            "evaluation": f"{WINDOWS} x {LENGTH} tokens of pydoc",
        }
        order = [[setting[name] for name in _KEYS] for setting in settings()]
        self.runs.sort(key=lambda run: order.index([run[name] for name in _KEYS]))
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_text(json.dumps({"common": common, "runs": self.runs}, indent=1) + "\n", encoding="utf-8")
        print(entry, flush=True)

    def wanted(self, again: bool, method: str | None, names: Sequence[str]) -> list[dict[str, object]]:
        """What is not recorded yet and can be run; what cannot is said."""
        known = [] if again else [[run[name] for name in _KEYS] for run in self.runs]
        asked = [s for s in settings() if method in (None, s["method"]) and (not names or s["peer"] in names)]
        for reason in sorted({missing(setting["peer"]) or "" for setting in asked} - {""}):
            print(f"left out: {reason}", file=sys.stderr)
        return [s for s in asked if [s[key] for key in _KEYS] not in known and not missing(s["peer"])]


def main(argv: Sequence[str] | None = None) -> int:
    """Record what is not recorded yet; `--again` makes it all anew."""
    names = [peer.name for peer in (OURS, *PEERS)]
    parser = argparse.ArgumentParser(prog="make record-peers", description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="also what was recorded before")
    parser.add_argument("--method", choices=("GPTQ", "AWQ"), help="runs of this method alone")
    parser.add_argument("--peer", choices=names, action="append", default=[], help="runs of this library (repeatable)")
    parser.add_argument("--collect", nargs=2, metavar=("NAME", "FOLDER"), help="record a kept run instead")
    parser.add_argument("--note", default="", help="what else there is to know of the collected run")
    args = parser.parse_args(argv)
    recorder = Recorder()
    if args.collect:
        recorder.add(recorder.collect(args.collect[0], Path(args.collect[1]), args.note))
        return 0
    for setting in recorder.wanted(args.again, args.method, args.peer):
        recorder.add(recorder.run(setting))
    return 0


if __name__ == "__main__":
    sys.exit(main())
