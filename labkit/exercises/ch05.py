"""Chapter 05: the accept step, the residual, both together, the draft length, prompt lookup, a loop to mend."""

from labkit.exercises import (
    _ch05_accept,
    _ch05_best_length,
    _ch05_emit,
    _ch05_fixed,
    _ch05_lookup,
    _ch05_residual,
)
from labkit.exercises._exercise import Exercise

__all__ = ["EXERCISES"]

EXERCISES: tuple[Exercise, ...] = (
    _ch05_accept.ACCEPT_STEP,
    _ch05_residual.RESIDUAL,
    _ch05_emit.EMIT,
    _ch05_best_length.BEST_DRAFT_LENGTH,
    _ch05_lookup.PROMPT_LOOKUP,
    _ch05_fixed.FIXED_SPECULATION,
)
