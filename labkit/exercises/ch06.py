"""Chapter 06: predict a rung, choose a stack, which rungs go together, read a load curve, top-p, a report to mend."""

from labkit.exercises import (
    _ch06_choose,
    _ch06_fixed,
    _ch06_load,
    _ch06_predict,
    _ch06_together,
    _ch06_top_p,
)
from labkit.exercises._exercise import Exercise

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    _ch06_predict.PREDICT_RUNG,
    _ch06_together.GOES_TOGETHER,
    _ch06_choose.CHOOSE_STACK,
    _ch06_top_p.TOP_P_FILTER,
    _ch06_load.READ_LOAD,
    _ch06_fixed.FIXED_LADDER,
)
