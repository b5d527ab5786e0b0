"""What a runner is given and gives back: a folder of safetensors and JSON. No labkit here: it runs where that is not.

settings.json        method, bits, group_size, sym, desc_act, damp_percent, dtype, threads
model/               the float model: config.json, *.safetensors, a tokenizer where the model has one
tokens.safetensors   calibration (n_samples, seq_len), evaluation (n_windows, context_length), int64
checkpoint/          written by the runner: what the library saves
result.json          written by the runner at the end: seconds, versions, notes
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Job:
    """The folder named on the command line."""

    def __init__(self) -> None:
        self.folder = Path(sys.argv[1]).resolve()
        self.settings = json.loads((self.folder / "settings.json").read_text(encoding="utf-8"))
        self.model, self.checkpoint = self.folder / "model", self.folder / "checkpoint"
        self.seconds: float | None = None
        self.notes: list[str] = []

    def tokens(self, name: str):
        """Token ids, int64."""
        from safetensors.torch import load_file

        return load_file(self.folder / "tokens.safetensors")[name]

    def examples(self) -> list:
        """The calibration samples in the form that GPTQModel and AutoGPTQ take."""
        return [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in self.tokens("calibration")]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Seconds of what stands inside: quantizing alone, without loading and saving."""
        start = time.perf_counter()
        yield
        self.seconds = time.perf_counter() - start

    def finish(self, package: str, version: str = "", **found: object) -> None:
        """Write `result.json`, under its name only once it is whole. version: "" for the installed one."""
        versions = {package: version or importlib.metadata.version(package)}
        versions |= {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        result = {"seconds": self.seconds, "versions": versions, "notes": self.notes, **found}
        part = self.folder / "result.json.part"
        part.write_text(json.dumps(result), encoding="utf-8")
        os.replace(part, self.folder / "result.json")
