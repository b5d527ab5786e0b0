"""`python -m tools.record_kv_merge`: the default model's KV heads merged to one, as chapter 03 shows it RECORDED.

Writes `data/recorded/kv_merge.json` at its end: the mean, calibrated and fitted, keys and values apart, and two of them
healed. About ten minutes on two quiet cores.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from labkit.attention.recorded import RECORDED
from labkit.attention.study import merge_study
from labkit.hardware import describe
from tools.recording import machine, short_commit


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study and keep it."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_kv_merge", description=__doc__.splitlines()[0])
    parser.add_argument("--heal-steps", type=int, default=40, help="of each healing")
    args = parser.parse_args(argv)
    threads = describe("cpu").cores
    torch.set_num_threads(threads)
    # As it is when the run begins: a commit made while it runs is not the one that ran.
    provenance = machine(threads) | {"commit": short_commit()}
    study = merge_study(heal_steps=args.heal_steps)
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    study.save(RECORDED, **provenance)
    print(study.table())
    print(study.apart_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
