"""What a ladder found: a line a rung, beside its baseline and its ceiling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from labkit import _check
from labkit._table import Table, readable
from labkit.engine.ladder.rungs import RUNGS
from labkit.measure import Label, Measurement, Timing


@dataclass(frozen=True)
class LadderStep:
    """One set of rungs, measured; or, where `refused` says why, a rung that does not go on.

    title: of the rung that came last, or what the set is called. ttft and tpot in seconds; `ceiling` is the most
    tokens a second that the measured read bandwidth allows for the bytes of a step, drafting not counted;
    tokens_per_call: verified in one pass of the target; acceptance: of drafted tokens; step_bytes: what a step in the
    middle of a generation must read at least; kv_bytes: of one token's keys and values.
    """

    title: str
    rungs: tuple[str, ...]
    refused: str = ""
    ttft: Timing | None = None
    tpot: Timing | None = None
    peak_bytes: int = 0
    weight_bytes: int = 0
    perplexity: float | None = None
    ceiling: float | None = None
    tokens_per_call: float = 1.0
    acceptance: float | None = None
    step_bytes: int = 0
    kv_bytes: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """After the first token, by the median."""
        return 1 / self.tpot.median


@dataclass(frozen=True, repr=False)
class Ladder:
    """`steps`, the first of them the baseline, each with one rung more; `also`, other sets from the same run.

    where: machine, date and whatever else a reader of the figures must know. Renders as a table.
    """

    model: str
    steps: tuple[LadderStep, ...]
    also: tuple[LadderStep, ...] = ()
    prompt_tokens: int = 0
    new_tokens: int = 0
    label: Label = Label.MEASURED
    where: Mapping[str, object] = field(default_factory=dict)

    def __repr__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()

    @property
    def baseline(self) -> LadderStep:
        """What every other line is a multiple of."""
        return self.steps[0]

    def measured(self) -> Iterator[LadderStep]:
        """The steps that ran."""
        return (step for step in self.steps if not step.refused)

    @property
    def top(self) -> LadderStep:
        """The last step that ran: everything that goes on."""
        return list(self.measured())[-1]

    @property
    def fastest(self) -> LadderStep:
        """Of all sets that ran."""
        return max((*self.measured(), *self.also), key=lambda step: step.tokens_per_second)

    def of(self, name: str) -> LadderStep:
        """The step that put a rung on, or another set by its title. Errors: ValueError for one that is not there."""
        found = {step.rungs[-1]: step for step in self.steps if step.rungs} | {step.title: step for step in self.also}
        _check.choice("name", name, list(found))
        return found[name]

    def speedup(self, step: LadderStep, over: LadderStep | None = None) -> float:
        """Tokens a second over those of the baseline, or of `over`."""
        return step.tokens_per_second / (over or self.baseline).tokens_per_second

    def gain(self, step: LadderStep) -> float:
        """Over the step before it that ran. Errors: ValueError for a step of `also`, which has none before it."""
        before = list(self.measured())
        _check.require(step in before, "step", step.title, "one of the ladder's own steps that ran")
        place = before.index(step)
        return 1.0 if place == 0 else self.speedup(step, before[place - 1])

    def loss(self, step: LadderStep) -> float | None:
        """Perplexity over the baseline's, less 1; None where it was not measured."""
        if step.perplexity is None or self.baseline.perplexity is None:
            return None
        return step.perplexity / self.baseline.perplexity - 1

    def table(self) -> Table:
        """A line a step."""
        columns = ("rung", "first token", "a token", "tokens/s", "speed-up", "of its ceiling", "peak memory", "loss")
        lines = [self._line(step, "" if place == 0 else "+ ") for place, step in enumerate(self.steps)]
        return Table(columns, tuple(lines + [self._line(step, "") for step in self.also]))

    def _line(self, step: LadderStep, sign: str) -> tuple[str, ...]:
        if step.refused:
            return (f"{sign}{step.title}", "–", "–", "–", "–", "–", "–", f"left out: {step.refused}")
        loss = self.loss(step)
        return (
            f"{sign}{step.title}",
            readable(step.ttft.median, "s"),
            readable(step.tpot.median, "s"),
            f"{step.tokens_per_second:.3g}",
            f"{self.speedup(step):.2f}x",
            "–" if step.ceiling is None else f"{step.tokens_per_second / step.ceiling:.0%}",
            readable(step.peak_bytes, "bytes"),
            "–" if loss is None else f"{loss:+.1%}",
        )

    def measurements(self) -> list[Measurement]:
        """Tokens a second, peak bytes and perplexity of each step that ran, for the ledger."""
        found = []
        for step in (*self.measured(), *self.also):
            params = {"model": self.model, "rungs": list(step.rungs), "prompt": self.prompt_tokens}
            options = {"label": self.label, "params": params | {"new_tokens": self.new_tokens}}
            figures = {
                "ladder tokens per second": (step.tokens_per_second, "tokens/s"),
                "ladder peak memory": (float(step.peak_bytes), "bytes"),
                "ladder time to first token": (step.ttft.median, "s"),
            }
            if step.perplexity is not None:
                figures["ladder perplexity"] = (step.perplexity, "")
            found += [Measurement.of(name, *figure, **options) for name, figure in figures.items()]
        return found


def title_of(rungs: tuple[str, ...], baseline: str) -> str:
    """The rung that came last, or the baseline."""
    return RUNGS[rungs[-1]].title if rungs else baseline
