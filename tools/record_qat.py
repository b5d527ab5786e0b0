"""`python -m tools.record_qat`: quantization-aware training of the default model, as chapter 02 shows it RECORDED.

Writes `data/recorded/qat_3bit.json` at its end: three trainings from one GPTQ start, and the tuned float model. A
quarter of an hour on two quiet cores.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from labkit.hardware import describe
from labkit.quantization import QATConfig
from labkit.quantization.qat_study import RECORDED, VARIANTS, qat_study
from tools.recording import machine, short_commit

SAMPLES, STEPS, POINTS = 64, 30, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and keep it."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_qat", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of each training")
    args = parser.parse_args(argv)
    threads = describe("cpu").cores
    torch.set_num_threads(threads)
    # As it is when the run begins: a commit made while it runs is not the one that ran.
    provenance = machine(threads) | {"commit": short_commit()}
    study = qat_study(
        config=QATConfig(steps=args.steps), n_samples=SAMPLES, n_points=POINTS, variants=VARIANTS, progress=True
    )
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    study.save(RECORDED, **provenance)
    for name, found in {"scales": study, **study.variants}.items():
        print(f"{name}: perplexity {found.points[0].perplexity:.2f} to {found.perplexity:.2f}, {found.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
