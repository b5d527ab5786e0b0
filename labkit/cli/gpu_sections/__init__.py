"""The sections of `gpu-check`. A chapter adds one: a function that fills a Recorder, and a line in `SECTIONS`.

A section runs in its own process with its own time-out. It needs only Python, torch, triton, transformers and pytest:
no network, no default model. `record` keeps what is measured as it is measured, so that a section that is killed
leaves what it had.
"""

from dataclasses import dataclass, field
from pathlib import Path

from labkit.cli.gpu_results import write_atomically

TIMEOUT_S = 45.0


@dataclass
class Recorder:
    """Where a section puts its results. `tiny` asks for shapes that a CPU runs in seconds, to test the section."""

    path: Path
    device: str
    tiny: bool
    results: dict[str, object] = field(default_factory=dict)
    targets: list[dict[str, object]] = field(default_factory=list)

    def record(self, name: str, value: object) -> None:
        """Keep a JSON value under `name`, on disk before this returns, and show it."""
        self.results[name] = value
        self._write()
        print(f"  {name}: {value}", flush=True)

    def target(self, name: str, value: float, *, at_least: float) -> None:
        """Keep a figure beside what it should reach. A miss is reported; it does not fail the section."""
        self.targets.append({"name": name, "value": value, "at_least": at_least, "met": value >= at_least})
        self._write()
        print(f"  {name}: {value:.3f}, target at least {at_least}", flush=True)

    def _write(self) -> None:
        write_atomically(self.path, {"results": self.results, "targets": self.targets})


@dataclass(frozen=True)
class Section:
    """`measure` is the "module:function" that fills a Recorder; it is imported only in the section's own process.
    `sources` are glob patterns of the files that a pass proves to run on a GPU."""

    name: str
    measure: str
    sources: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S


_EIGHT_BIT = ("labkit/quantization/row_scaled.py", "labkit/quantization/smoothquant.py", "labkit/quantization/fp8.py")
_PACKED = (
    "labkit/kernels/quantized_linear/*.py",
    "labkit/kernels/types.py",
    "labkit/kernels/bits.py",
    "labkit/kernels/_tensor_fields.py",
)
_KV = (
    "labkit/kernels/decode_attention/*.py",
    "labkit/kernels/kv_quantize/*.py",
    "labkit/kernels/kv_types.py",
    "labkit/kernels/_tensor_fields.py",
)
_FLASH = (
    "labkit/kernels/flash_attention/*.py",
    "labkit/attention/implementations.py",
    "labkit/attention/_runners.py",
)
_IN_MODELS = ("labkit/attention/registration.py", "labkit/attention/masks.py")
_ENGINE = ("labkit/engine/*.py", "labkit/kernels/dense_linear/*.py")
_SPECULATIVE = ("labkit/speculative/*.py", *_ENGINE)

# In the order they run: what the others are held against comes first. Together they fill six minutes.
SECTIONS = (
    Section("environment", "labkit.cli.gpu_sections.machine:environment", timeout_s=15.0),
    Section(
        "ceilings",
        "labkit.cli.gpu_sections.machine:ceilings",
        ("labkit/hardware.py", "labkit/measure.py"),
        timeout_s=30.0,
    ),
    Section(
        "tests",
        "labkit.cli.gpu_sections.tests:gpu_tests",
        (*_ENGINE, "labkit/kernels/**/triton.py", "labkit/kernels/flash_attention/*.py", *_IN_MODELS),
    ),
    Section("decoder_1b", "labkit.cli.gpu_sections.decoder:decoder_1b", _ENGINE, timeout_s=20.0),
    Section("decoder_8b", "labkit.cli.gpu_sections.decoder:decoder_8b", _ENGINE, timeout_s=35.0),
    Section("speculative", "labkit.cli.gpu_sections.speculative:speculative", _SPECULATIVE),
    Section("ladder", "labkit.cli.gpu_sections.ladder:ladder", ("labkit/engine/ladder/*.py", *_SPECULATIVE)),
    Section("quantized_linear", "labkit.cli.gpu_sections.quantized_linear:quantized_linear", _PACKED, timeout_s=35.0),
    Section("decode_attention", "labkit.cli.gpu_sections.decode_attention:decode_attention", _KV, timeout_s=35.0),
    Section("flash_attention", "labkit.cli.gpu_sections.flash_attention:flash_attention", _FLASH, timeout_s=35.0),
    Section("eight_bit", "labkit.cli.gpu_sections.eight_bit:eight_bit", _EIGHT_BIT, timeout_s=20.0),
)
