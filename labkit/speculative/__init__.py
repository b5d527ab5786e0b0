"""Speculative decoding: a cheap drafter proposes several tokens, the target checks them in one pass, losslessly."""

import importlib

_ROOM_OF = {
    "DraftModel": "labkit.speculative.draft_model",
    "DraftTree": "labkit.speculative.tree",
    "EagleHead": "labkit.speculative.eagle",
    "PromptLookup": "labkit.speculative.prompt_lookup",
    "Proposal": "labkit.speculative.interface",
    "Proposer": "labkit.speculative.interface",
    "Sampling": "labkit.speculative.interface",
    "SpeculativeOutput": "labkit.speculative.loop",
    "SpeculativeStats": "labkit.speculative.stats",
    "expected_speedup": "labkit.speculative.theory",
    "expected_tokens": "labkit.speculative.theory",
    "generate": "labkit.speculative.decode",
}

__all__ = list(_ROOM_OF)


def __getattr__(name: str) -> object:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(_ROOM_OF[name]), name)
    raise AttributeError(f"module 'labkit.speculative' has no attribute {name!r}")
