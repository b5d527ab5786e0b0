"""Argument checks. Each raises a ValueError that names the argument, what it got and what it takes."""

import difflib
import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import torch

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def require(ok: bool, name: str, got: object, takes: str) -> None:
    """Raise unless `ok`."""
    if not ok:
        text = repr(got)
        raise ValueError(f"{name}: got {text if len(text) <= 200 else text[:197] + '...'}; takes {takes}")


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return f" of at most {high}" if high is not None else ""


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int within [low, high]; booleans and floats are refused."""
    ok = isinstance(value, Integral) and not isinstance(value, bool)
    ok = ok and (low is None or value >= low) and (high is None or value <= high)
    require(ok, name, value, f"an integer{_range(low, high)}")
    return int(value)


def _finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """`value` as a float within [low, high]; booleans, NaN and infinities are refused."""
    ok = isinstance(value, Real) and not isinstance(value, bool) and _finite(value)
    ok = ok and (low is None or value >= low) and (high is None or value <= high)
    require(ok, name, value, f"a number{_range(low, high)}{', and finite' if high is None else ''}")
    return float(value)


def seed(name: str, value: object) -> int:
    """`value` as an int that `torch.Generator.manual_seed` takes."""
    return integer(name, value, 0, 2**64 - 1)


def near(value: object, options: Iterable[object]) -> str:
    """A sentence that lists the options, nearest spelling first."""
    names = [str(option) for option in options]
    close = difflib.get_close_matches(str(value), names, n=3, cutoff=0.5)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    return f"one of {', '.join(names)}{hint}"


def choice(name: str, value: object, options: Sequence[object]) -> object:
    """`value` if it is one of `options`."""
    require(value in options, name, value, near(value, options))
    return value


def tensor(
    name: str, value: object, *, ndim: int | None = None, dtypes: Sequence[torch.dtype] | None = None
) -> torch.Tensor:
    """`value` if it is a tensor of that rank and one of those dtypes."""
    require(isinstance(value, torch.Tensor), name, type(value).__name__, "a torch.Tensor")
    require(ndim is None or value.ndim == ndim, name, f"shape {tuple(value.shape)}", f"{ndim} dimensions")
    takes = " or ".join(str(d) for d in dtypes or ())
    require(dtypes is None or value.dtype in dtypes, name, str(value.dtype), takes)
    return value


def dtype(name: str, value: object) -> torch.dtype:
    """A dtype that models compute in, from itself or from its name, such as "bfloat16"."""
    key = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    require(isinstance(key, str) and key in _DTYPES, name, value, near(key, _DTYPES))
    return _DTYPES[key]


def device(name: str, value: object) -> torch.device:
    """A torch device that this machine has; None is the one that would be used by default (CUDA if there is one)."""
    if value is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        found = torch.device(value)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        found = None
    takes = "a device such as 'cpu' or 'cuda:0'"
    require(found is not None and found.type in ("cpu", "cuda"), name, value, takes)
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    takes = f"{takes}; this machine has {count} CUDA GPUs"
    # torch keeps an index in one byte: a large one comes back negative.
    require(found.type == "cpu" or 0 <= (found.index or 0) < count, name, value, takes)
    # One name a device: "cpu:0" must take the same lock as "cpu".
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else torch.device("cpu")
