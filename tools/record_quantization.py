"""`make record`: the runs over a whole model that chapter 02 shows as RECORDED, measured on this machine.

Writes `data/recorded/quantization.json` after each run, and goes on where it stopped. About half an hour on two cores.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator, Sequence

import torch

from labkit.corpora import load_text, token_batches
from labkit.hardware import describe
from labkit.models import DEFAULT_MODEL, load_model, shared_copy
from labkit.quality import perplexity
from labkit.quantization import AWQConfig, GPTQConfig, RTNConfig, quantize_
from labkit.quantization.mixed import choose_bits, sensitivity
from labkit.quantization.plan import plan
from labkit.quantization.recorded import RECORDED, SENSITIVITY, recorded_sensitivity
from tools.recording import machine, short_commit

SAMPLES, LENGTH, WINDOWS = 32, 512, 6
# The budget of the setting that the chapter ends on: bytes over those of the same matrices in 16 bits.
BUDGET = 0.35
_METHODS = {"RTN": RTNConfig, "GPTQ": GPTQConfig, "AWQ": AWQConfig}


def settings() -> Iterator[dict[str, object]]:
    """Every run, the chapter's tables first. Rounding to nearest at other groups is measured live in the lab."""
    for bits in (4, 3, 8, 2):
        yield from ({"method": method, "bits": bits, "group_size": 64} for method in _METHODS)
        if bits == 8:
            for method in ("AWQ", "GPTQ"):
                yield {"method": method, "bits": 4, "group_size": 64, "plan": f"{BUDGET} of 16 bits"}
    for group_size, bits in ((32, 4), (32, 3), (-1, 4), (16, 4), (16, 3)):
        yield from ({"method": method, "bits": bits, "group_size": group_size} for method in ("GPTQ", "AWQ"))


class Recorder:
    """The model, its texts, and the runs so far."""

    def __init__(self) -> None:
        # All cores, and not what is fastest for a step: these are long runs of large products.
        self.threads = describe("cpu").cores
        torch.set_num_threads(self.threads)
        self.provenance = machine(self.threads) | {"commit": short_commit()}
        self.loaded = load_model(device="cpu", dtype=torch.float32)
        tokenizer = self.loaded.tokenizer
        self.calibration = token_batches(tokenizer, load_text("pydoc", "calibration"), SAMPLES, LENGTH, seed=0)
        ids = tokenizer(load_text("pydoc", "eval"), add_special_tokens=False, verbose=False).input_ids
        self.evaluation = torch.tensor(ids)[: WINDOWS * LENGTH]
        self.runs = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"] if RECORDED.exists() else []

    @functools.cached_property
    def baseline(self) -> float:
        """The float model's perplexity."""
        return perplexity(self.loaded.model, self.evaluation, LENGTH)

    def fresh(self) -> torch.nn.Module:
        """A copy that shares every tensor with the model."""
        return shared_copy(self.loaded.model)

    def run(self, setting: dict[str, object]) -> dict[str, object]:
        """Quantize and evaluate; the setting with what came out."""
        model, bits_per_module = self.fresh(), None
        config = _METHODS[setting["method"]](bits=setting["bits"], group_size=setting["group_size"])
        if "plan" in setting:
            linears = plan(model, ("lm_head",)).linears
            budget = int(BUDGET * sum(2 * linear.weight.numel() for linear in linears.values()))
            bits_per_module = choose_bits(recorded_sensitivity().by_name, linears, config, budget)
        calibration = None if setting["method"] == "RTN" else self.calibration
        report = quantize_(model, config, calibration, bits_per_module=bits_per_module)
        value = perplexity(model, self.evaluation, LENGTH)
        return setting | {
            "sym": bool(getattr(config, "sym", False)),
            "perplexity": round(value, 4) if math.isfinite(value) else None,
            "bits_per_weight": round(report.bits_per_weight, 4),
            "seconds": round(report.seconds, 1),
            "baseline": round(self.baseline, 4),
            **self.provenance,
        }

    def write(self) -> None:
        """All runs so far, with what they have in common: each keeps the machine, date and commit of its own."""
        common = {
            "model": DEFAULT_MODEL,
            "calibration": f"{SAMPLES} x {LENGTH} tokens of pydoc",
            "evaluation": f"{WINDOWS} x {LENGTH} tokens of pydoc",
        }
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_text(json.dumps({"common": common, "runs": self.runs}, indent=1) + "\n", encoding="utf-8")

    def record_sensitivity(self) -> None:
        """What rounding each matrix alone to 3 bits costs, on two short calibration windows."""
        found = dict(sensitivity(self.loaded, RTNConfig(bits=3, group_size=64), self.calibration[:2, :256]))
        record = {"by_name": {n: round(v, 7) for n, v in found.items()}, "bits": 3, "group_size": 64}
        record |= self.provenance
        SENSITIVITY.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Record what is not recorded yet; `--again` starts over."""
    parser = argparse.ArgumentParser(prog="make record", description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="forget what was recorded before")
    parser.add_argument("--only", choices=_METHODS, help="runs of this method alone")
    args = parser.parse_args(argv)
    recorder = Recorder()
    if args.again:
        recorder.runs = []
    if args.again or not SENSITIVITY.exists():
        recorder.record_sensitivity()
    keys = ("method", "bits", "group_size", "plan")
    known = {tuple(run.get(key) for key in keys) for run in recorder.runs}
    for setting in settings():
        wanted = args.only in (None, setting["method"]) and tuple(setting.get(key) for key in keys) not in known
        if wanted:
            recorder.runs.append(recorder.run(setting))
            print(recorder.runs[-1], flush=True)
            recorder.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
