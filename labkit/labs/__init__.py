"""Interactive labs, one file a lab. Each function returns an ipywidgets widget that measures as its knobs move.

ipywidgets and plotly are imported when a lab is first asked for, not before.
"""

import importlib

_MODULE_OF = {
    "eviction_lab": "labkit.labs.eviction",
    "flash_attention_lab": "labkit.labs.flash_attention",
    "kv_cache_lab": "labkit.labs.kv_cache",
    "paging_lab": "labkit.labs.paging",
    "quantization_lab": "labkit.labs.quantization",
    "roofline_lab": "labkit.labs.roofline",
    "sampling_lab": "labkit.labs.sampling",
    "speculative_lab": "labkit.labs.speculative",
    "stack_lab": "labkit.labs.stack",
    "tile_walk_lab": "labkit.labs.tile_walk",
}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'labkit.labs' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
