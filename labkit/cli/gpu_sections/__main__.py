"""One section in this process: `python -m labkit.cli.gpu_sections MODULE:FUNCTION FILE DEVICE`, for `gpu-check`."""

import importlib
import os
import sys
from pathlib import Path

from labkit.cli.gpu_sections import Recorder


def main(measure: str, result: str, device: str) -> None:
    """Measure; an error is a traceback on standard error and exit code 1, with what was recorded until then kept."""
    tiny = device == "cpu"
    if tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read as Triton is imported
        # Read as torch is imported. Tiny tensors gain nothing from more, and stall where a neighbour is busy.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    module, function = measure.split(":")
    getattr(importlib.import_module(module), function)(Recorder(Path(result), device, tiny=tiny))


if __name__ == "__main__":
    main(*sys.argv[1:])
