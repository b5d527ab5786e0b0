"""The ladder: one technique after another put on one model, and each rung measured beside the same baseline."""

from labkit.engine.ladder.measure import measure_ladder
from labkit.engine.ladder.popular import POPULAR, PopularRung
from labkit.engine.ladder.record import read_ladder, recorded_ladders, write_ladder
from labkit.engine.ladder.result import Ladder, LadderStep
from labkit.engine.ladder.rungs import RUNGS, Rung, refusals
from labkit.engine.ladder.stack import Stack, StackRun
from labkit.engine.ladder.weights import StackModels, WeightForm

__all__ = [
    "POPULAR",
    "RUNGS",
    "Ladder",
    "LadderStep",
    "PopularRung",
    "Rung",
    "Stack",
    "StackModels",
    "StackRun",
    "WeightForm",
    "measure_ladder",
    "read_ladder",
    "recorded_ladders",
    "refusals",
    "write_ladder",
]
