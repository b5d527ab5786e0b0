"""The decode engine: one step of a model, the loop around it, and where its time goes."""

import importlib

_ROOM_OF = {
    "Decoder": "labkit.engine.decode",
    "GenerationResult": "labkit.engine.decode",
    "StaticKVCache": "labkit.engine.cache",
    "count_launches": "labkit.engine.profile",
    "op_times": "labkit.engine.profile",
}

__all__ = list(_ROOM_OF)


def __getattr__(name: str) -> object:
    if name in _ROOM_OF:
        return getattr(importlib.import_module(_ROOM_OF[name]), name)
    raise AttributeError(f"module 'labkit.engine' has no attribute {name!r}")
