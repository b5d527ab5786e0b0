"""The ladder that is told everywhere, beside which a measured one stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PopularRung:
    """speed: times the baseline. memory: share of the baseline's. rung: the course's, or "" for the baseline. claim:
    its row in `data/claims.yaml`."""

    title: str
    speed: float
    memory: float | None
    rung: str
    claim: str


# Nobody names the baseline; only against PyTorch's eager mode has the like of it been measured (claims, chapter 6).
POPULAR = (
    PopularRung("baseline", 1.0, 1.0, "", ""),
    PopularRung("INT8 weights", 1.8, None, "int8", "ladder-step-1"),
    PopularRung("INT4 weights", 3.0, None, "int4", "ladder-step-2"),
    PopularRung("FlashAttention and quantized cache", 5.0, None, "quantized_kv", "ladder-step-3"),
    PopularRung("speculation", 8.0, 0.3, "speculation", "ladder-step-4"),
)
