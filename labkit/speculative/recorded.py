"""How the head that ships with the course was trained, and what it reached: `data/recorded/eagle_head.json`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit._paths import DATA
from labkit.measure import Label, Measurement
from labkit.speculative._train_eval import HeldOut
from labkit.speculative._train_state import Checked

RECORDED = DATA / "recorded" / "eagle_head.json"


@dataclass(frozen=True)
class RecordedHead:
    """A training as `python -m labkit.speculative.train` wrote it down, with where and when it ran.

    settings: the command's. draft_vocabulary_share: of the tokens of the answers that it was trained on, those in its
    vocabulary. seconds: of training alone. losses: of each tenth step, in nats, all tokens of a draft together.
    """

    model: str
    machine: str
    date: str
    commit: str
    settings: Mapping[str, object]
    draft_vocabulary_share: float
    seconds: float
    losses: tuple[float, ...]
    checked: tuple[Checked, ...]
    held_out: tuple[HeldOut, ...]

    def on(self, kind: str, num_assistant_tokens: int) -> HeldOut:
        """One run over held-out prompts. Errors: LookupError where it was not recorded."""
        for run in self.held_out:
            if (run.kind, run.num_assistant_tokens) == (kind, num_assistant_tokens):
                return run
        raise LookupError(f"no recorded run over {kind!r} with {num_assistant_tokens} drafted tokens")

    def measurement(self, name: str, value: float, unit: str, **params: object) -> Measurement:
        """One of these figures as a Measurement, labelled RECORDED."""
        params = {"model": self.model, "date": self.date, "commit": self.commit} | params
        return Measurement(name, value, unit, label=Label.RECORDED, device=self.machine, params=params)


@functools.cache
def recorded_head(path: Path = RECORDED) -> RecordedHead:
    """What was recorded. Errors: FileNotFoundError where nothing was."""
    found = json.loads(path.read_text(encoding="utf-8"))
    checked = tuple(Checked(look["step"], tuple(look["matches"])) for look in found.pop("checked"))
    held_out = tuple(HeldOut(**run | {"kept": tuple(run["kept"])}) for run in found.pop("held_out"))
    return RecordedHead(**found | {"losses": tuple(found["losses"]), "checked": checked, "held_out": held_out})
