"""`transformers`' own quantized caches beside this package's, wherever their backends are installed."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import transformers
from transformers import Cache, PretrainedConfig

from labkit.kv_cache.quantized import QuantizedCache

# Backend of transformers' QuantizedCache: the module it needs, how to install it, and the axes its documentation sets.
_BACKENDS = {
    "quanto": ("optimum.quanto", "pip install optimum-quanto", 0),
    "hqq": ("hqq", "pip install hqq", 1),
}


@dataclass(frozen=True)
class Peer:
    """One cache to compare: `make()` gives a new one; None where it cannot be had, and `why` says what is missing."""

    name: str
    make: Callable[[], Cache] | None
    why: str = ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def quantized_peers(
    config: PretrainedConfig, nbits: int = 4, q_group_size: int = 32, residual_length: int = 32
) -> list[Peer]:
    """This package's quantized cache, then `transformers`' own by each backend, with the same settings where it takes
    them: FP8 takes none."""
    settings = {"nbits": nbits, "q_group_size": q_group_size, "residual_length": residual_length}
    peers = [Peer("labkit", lambda: QuantizedCache(config, **settings))]
    for backend, (module, install, axis) in _BACKENDS.items():
        axes = {"axis_key": axis, "axis_value": axis}

        def make(backend: str = backend, axes: Mapping[str, int] = axes) -> Cache:
            return transformers.QuantizedCache(backend, config, **settings, **axes)

        there = _installed(module)
        why = "" if there else f"{module} is not installed ({install})"
        peers.append(Peer(f"transformers, {backend}", make if there else None, why))
    # Older versions have no such backend, and no way to ask but the text.
    has_fp8 = '"fp8"' in inspect.getsource(transformers.QuantizedCache.__init__)
    why = "" if has_fp8 else f"transformers {transformers.__version__} has no such backend"
    peers.append(
        Peer("transformers, fp8", (lambda: transformers.QuantizedCache("fp8", config)) if has_fp8 else None, why)
    )
    return peers
