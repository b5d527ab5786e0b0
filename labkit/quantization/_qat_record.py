"""What a study of quantization-aware training found, as it is kept in a file."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit._paths import DATA

RECORDED = DATA / "recorded" / "qat_3bit.json"


@dataclass(frozen=True)
class Point:
    """After `step` steps and `seconds` of training: the perplexity on the evaluation windows, and the loss of that
    step, None before the first."""

    step: int
    loss: float | None
    perplexity: float
    seconds: float


@dataclass(frozen=True)
class Variant:
    """Another training from the same start, on the same batches in as many steps. changes: the fields of the config in
    which it differs. code_changes: the share of codes that are not the start's. The rest as in QATStudy."""

    changes: Mapping[str, object]
    points: tuple[Point, ...]
    perplexity: float
    losses: tuple[float, ...]
    seconds: float
    code_changes: float
    kl_after: Mapping[str, float]


@dataclass(frozen=True)
class Control:
    """Float, tuned on the same batches: next-token loss, all its weights.

    Not the student's training in float: that has the float model for its teacher, and may train step sizes alone. What
    it tells is how far text like the evaluation's lowers perplexity where nothing was rounded. learning_rate: Adam's,
    in weights.
    """

    learning_rate: float
    perplexity_before: float
    perplexity_after: float
    losses: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class QATStudy:
    """One comparison. Perplexities are in float32 over the same windows; `points` begin with the quantized model that
    training starts from, and `perplexity` is that of the packed model in the end. kl_before, kl_after: mean
    KL(float model || quantized model) in nats a token by name of the text, at the start and of the packed model. Each
    name is a corpus, of which its "eval" part was used. code_changes: the share of codes that are not the start's.
    variants: other trainings by name. `provenance`: machine, versions, date and commit, of a run that was recorded."""

    model: str
    config: Mapping[str, object]
    n_samples: int
    seq_len: int
    eval_windows: int
    baseline: float
    points: tuple[Point, ...]
    perplexity: float
    losses: tuple[float, ...]
    seconds: float
    bits_per_weight: float
    control: Control
    kl_before: Mapping[str, float]
    kl_after: Mapping[str, float]
    code_changes: float = 0.0
    variants: Mapping[str, Variant] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def recovered(self) -> float:
        """The share of the start's excess perplexity over the float model that training won back."""
        start = self.points[0].perplexity
        return (start - self.perplexity) / (start - self.baseline)

    def save(self, path: Path, **provenance: str) -> None:
        """Write it as JSON, with where it was measured."""
        kept = dataclasses.replace(self, provenance=provenance)
        path.write_text(json.dumps(dataclasses.asdict(kept), indent=1) + "\n", encoding="utf-8")


@functools.cache
def recorded_study(path: Path = RECORDED) -> QATStudy:
    """The recorded run. Errors: OSError where there is no such file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    control = found["control"]
    found["control"] = Control(**(control | {"losses": tuple(control["losses"])}))
    found["variants"] = {name: Variant(**_curve(kept)) for name, kept in found.get("variants", {}).items()}
    return QATStudy(**_curve(found))


def _curve(kept: Mapping[str, object]) -> dict[str, object]:
    points = tuple(Point(**point) for point in kept["points"])
    return dict(kept) | {"points": points, "losses": tuple(kept["losses"])}
