"""What a learner did in this session, and how a result, a hint and the overview are shown."""

import html
from dataclasses import dataclass, field

from labkit._table import Table
from labkit.exercises._exercise import Exercise

NOT_ATTEMPTED = "not attempted yet"


@dataclass(frozen=True)
class CheckResult:
    """`passed` is None where the stub was untouched. Shown by the notebook as the value of its cell."""

    name: str
    passed: bool | None
    message: str

    def __repr__(self) -> str:
        if self.passed is None:
            return f"{self.name}: {self.message}"
        return f"{self.name}: {'passed' if self.passed else 'not yet'}: {self.message}"

    def _repr_html_(self) -> str:
        color = {None: "#666", True: "#1a7f37", False: "#b35900"}[self.passed]
        return f'<div style="border-left:4px solid {color};padding:.3em .8em">{html.escape(repr(self))}</div>'


@dataclass(frozen=True)
class Hints:
    """The hints asked for so far."""

    name: str
    shown: tuple[str, ...]
    total: int

    def __repr__(self) -> str:
        lines = [f"{self.name}, hint {i} of {self.total}: {text}" for i, text in enumerate(self.shown, 1)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in self.shown)
        return f"<div>{html.escape(self.name)}, {len(self.shown)} of {self.total} hints<ol>{items}</ol></div>"


@dataclass(frozen=True)
class Status:
    """One row an exercise: chapter, name, state, attempts, hints."""

    table: Table

    def __repr__(self) -> str:
        return self.table.text()

    def _repr_html_(self) -> str:
        return self.table.html()


@dataclass
class _Progress:
    attempts: int = 0
    passed: bool = False
    hints: int = 0


@dataclass
class Session:
    """Attempts, passes and hints by exercise; it lives as long as the kernel."""

    progress: dict[str, _Progress] = field(default_factory=dict)

    def _of(self, name: str) -> _Progress:
        return self.progress.setdefault(name, _Progress())

    def record(self, result: CheckResult) -> CheckResult:
        """Count an attempt; what was passed once stays passed."""
        if result.passed is not None:
            progress = self._of(result.name)
            progress.attempts += 1
            progress.passed |= result.passed
        return result

    def next_hint(self, exercise: Exercise) -> Hints:
        """One hint more than last time, until there are no more."""
        progress = self._of(exercise.name)
        progress.hints = min(progress.hints + 1, len(exercise.hints))
        return Hints(exercise.name, exercise.hints[: progress.hints], len(exercise.hints))

    def status(self, exercises: list[Exercise]) -> Status:
        """A table of all exercises."""
        rows = []
        for exercise in exercises:
            p = self._of(exercise.name)
            state = "passed" if p.passed else "not yet passed" if p.attempts else NOT_ATTEMPTED
            hints = f"{p.hints} of {len(exercise.hints)}"
            rows.append((f"{exercise.chapter:02d}", exercise.name, state, str(p.attempts), hints))
        return Status(Table(("chapter", "exercise", "state", "attempts", "hints"), tuple(rows)))
