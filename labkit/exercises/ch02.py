"""Chapter 02: a row quantized and packed, a column of GPTQ, AWQ's search for a scale, a calibration loop to mend."""

from labkit.exercises import _ch02_awq, _ch02_calibration, _ch02_gptq, _ch02_pack
from labkit.exercises._exercise import Exercise

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    _ch02_pack.PACK_ROW,
    _ch02_gptq.GPTQ_UPDATE,
    _ch02_awq.AWQ_SCALE,
    _ch02_calibration.FIXED_CALIBRATION,
)
