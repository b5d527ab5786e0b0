"""What merging the KV heads of the default model cost, as this project recorded it: `data/recorded/kv_merge.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit._paths import DATA
from labkit._table import Table
from labkit.measure import Label, Measurement

RECORDED = DATA / "recorded" / "kv_merge.json"


@dataclass(frozen=True)
class MergeResult:
    """One merged model beside its original. method: "mean", "calibrated" or "fitted", with ", healed" behind it after
    a healing; merge: "both", or "keys" or "values" alone. perplexity and kl (KL(original || merged), nats a token) on
    the evaluation windows; loss_rise: nats a token above the original's loss there; kl_other: on text of another kind
    than the calibration's. bytes_per_token: of the KV cache, in float32. seconds: what merging took, its healing
    included."""

    method: str
    merge: str
    perplexity: float
    loss_rise: float
    kl: float
    top1: float
    kl_other: float
    bytes_per_token: int
    seconds: float


@dataclass(frozen=True)
class HealingPoint:
    """After `step` steps and `seconds` of healing: the loss of that step, None before the first, and the perplexity on
    the evaluation windows."""

    step: int
    loss: float | None
    perplexity: float
    seconds: float


@dataclass(frozen=True)
class Healing:
    """A training of a merged model, `start` being the method that merged it. losses: KL to the original at each step,
    in nats a token, of that step's sample."""

    start: str
    points: tuple[HealingPoint, ...]
    losses: tuple[float, ...]
    seconds: float
    learning_rate: float


@dataclass(frozen=True)
class MergeStudy:
    """All of it for one model. baseline: the original's perplexity on `eval_windows` windows of `seq_len` tokens of the
    evaluation part of `text`; other_text: where `kl_other` was measured. provenance: machine, date and commit."""

    model: str
    num_key_value_heads_before: int
    num_key_value_heads: int
    text: str
    other_text: str
    seq_len: int
    eval_windows: int
    n_samples: int
    fit_steps: int
    baseline: float
    bytes_per_token_before: int
    results: tuple[MergeResult, ...]
    healings: tuple[Healing, ...]
    provenance: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def result(self, method: str, merge: str = "both") -> MergeResult:
        """Errors: KeyError for a setting that was not measured."""
        found = {(result.method, result.merge): result for result in self.results}
        return found[method, merge]

    def measurement(self, method: str, merge: str = "both") -> Measurement:
        """Nats a token lost, labelled RECORDED."""
        found = self.result(method, merge)
        params = {"method": method, "merge": merge, "num_key_value_heads": self.num_key_value_heads}
        params |= {"model": self.model, **{k: v for k, v in self.provenance.items() if k != "machine"}}
        device = self.provenance.get("machine")
        return Measurement("loss rise", found.loss_rise, "nats", label=Label.RECORDED, device=device, params=params)

    def table(self) -> Table:
        """A row a merged model."""
        rows = tuple(
            (
                result.method,
                {"both": "keys and values"}.get(result.merge, f"{result.merge} alone"),
                f"{result.perplexity:,.2f}",
                f"{result.loss_rise:+.2f}",
                f"{result.kl:.2f}",
                f"{result.kl_other:.2f}",
                f"{result.top1:.0%}",
                f"{result.bytes_per_token:,}",
                f"{result.seconds:.0f} s",
            )
            for result in self.results
        )
        text = (f"KL {self.text}", f"KL {self.other_text}")
        return Table(("method", "merged", "perplexity", "nats lost", *text, "top-1", "bytes a token", "time"), rows)

    def apart_table(self) -> Table:
        """Nats a token lost: keys alone and values alone, by their mean and by what a calibration chose."""
        methods = ("mean", "calibrated")
        rows = (
            (part, *(f"{self.result(method, part).loss_rise:+.2f}" for method in methods))
            for part in ("keys", "values")
        )
        return Table(("merged", *methods), tuple(rows))

    def save(self, path: Path, **provenance: str) -> None:
        """Write it as JSON, with where it was measured."""
        kept = dataclasses.replace(self, provenance=provenance)
        path.write_text(json.dumps(dataclasses.asdict(kept), indent=1) + "\n", encoding="utf-8")


@functools.cache
def recorded_merge_study(path: Path = RECORDED) -> MergeStudy:
    """The recorded run. Errors: OSError where there is no such file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found["results"] = tuple(MergeResult(**result) for result in found["results"])
    found["healings"] = tuple(_healing(healing) for healing in found["healings"])
    return MergeStudy(**found)


def _healing(kept: Mapping[str, object]) -> Healing:
    points = tuple(HealingPoint(**point) for point in kept["points"])
    return Healing(**(dict(kept) | {"points": points, "losses": tuple(kept["losses"])}))
