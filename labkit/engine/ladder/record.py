"""Ladders that were measured and kept, in `data/recorded/ladders.json`, with machine, date and commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from labkit._paths import DATA
from labkit.engine.ladder.result import Ladder, LadderStep
from labkit.measure import Label, Timing

RECORDED = DATA / "recorded" / "ladders.json"


def recorded_ladders(path: Path | None = None) -> dict[str, Ladder]:
    """By name, such as "smollm2-135m, cpu"; none where nothing was recorded.

    Errors: ValueError that names the file and what is wrong in it, for one that `write_ladder` did not write.
    """
    path = path or RECORDED
    if not path.exists():
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return {name: read_ladder(found) for name, found in kept.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = f"{type(error).__name__}: {error}"
        raise ValueError(f"path: got {path}; takes ladders as write_ladder keeps them ({wrong})") from error


def read_ladder(found: Mapping[str, object]) -> Ladder:
    """What `write_ladder` wrote, labelled RECORDED."""
    steps, also = (tuple(_step(row) for row in found[name]) for name in ("steps", "also"))
    fields = {name: found[name] for name in ("model", "prompt_tokens", "new_tokens", "where")}
    return Ladder(steps=steps, also=also, label=Label.RECORDED, **fields)


def _step(row: Mapping[str, object]) -> LadderStep:
    times = {name: row[name] and Timing(**row[name]) for name in ("ttft", "tpot")}
    return LadderStep(**(dict(row) | times | {"rungs": tuple(row["rungs"])}))


def write_ladder(name: str, ladder: Ladder, where: Mapping[str, object], path: Path | None = None) -> None:
    """Keep a ladder under `name`, beside those that are kept already. where: machine, date, commit and settings."""
    path = path or RECORDED
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = asdict(replace(ladder, where=dict(where)))
    kept[name] = {key: value for key, value in found.items() if key != "label"}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
