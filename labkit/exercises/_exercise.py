"""What an exercise is made of: its text and hints, a check that raises on the first property that fails, and probes."""

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import labkit

_PACKAGE = Path(labkit.__file__).parent


# How PyTorch says that an operator does not know a dtype or a device; a stub says something else, or nothing.
_OF_TORCH = re.compile("not implemented for|Could not run")


class NotAttempted(Exception):
    """The stub is as it was: nothing to test."""


class Failed(Exception):
    """A property does not hold; the message says which, to the learner."""


def expect(ok: bool, message: str) -> None:
    """Fail with `message` unless `ok`."""
    if not ok:
        raise Failed(message)


@dataclass(frozen=True)
class Exercise:
    """`task` is the one-line text, `signature` what the learner writes; `test` takes the answer, raises Failed or
    NotAttempted, and returns what to say when all holds. `hints` go from a nudge to nearly the answer."""

    name: str
    chapter: int
    task: str
    signature: str
    hints: tuple[str, ...]
    test: Callable[[object], str]


class Answer:
    """A learner's function, called by a check.

    An untouched stub (None, `...`, NotImplementedError, or a function that returns nothing) raises NotAttempted; once
    it has answered, returning nothing is a fault like any other. What the function raises becomes Failed.
    """

    def __init__(self, function: object, signature: str) -> None:
        self.signature = signature
        self.answered = False
        if function is None or function is Ellipsis:
            raise NotAttempted
        expect(callable(function), f"pass the function itself, {signature}; got {_short(function)}")
        self.function: Callable[..., object] = function

    def __call__(self, *args: object) -> object:
        try:
            value = self.function(*args)
        except NotImplementedError as error:
            if not self.answered and not _OF_TORCH.search(str(error)):
                raise NotAttempted from None
            raise Failed(f"your function raised NotImplementedError: {error}") from error
        except Exception as error:
            text = f"your function raised {type(error).__name__}: {error}"
            hint = f" (it is called as {self.signature})" if isinstance(error, TypeError) else ""
            raise Failed(text + hint) from error
        if value is None or value is Ellipsis:
            if not self.answered:
                raise NotAttempted
            raise Failed("your function returned nothing for some arguments: does every branch return?")
        self.answered = True
        return value

    def number(self, *args: object) -> float:
        """Its value as a positive, finite float."""
        return as_number(self(*args), "your function's result")


def as_number(value: object, what: str) -> float:
    """A positive, finite float; one-element tensors and numpy numbers will do."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise Failed(f"{what} should be a number; got {_short(value)}") from None
    expect(math.isfinite(number) and number > 0, f"{what} should be a positive, finite number; got {number:g}")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def near(value: float, target: float, tolerance: float = 1e-6) -> bool:
    """Within `tolerance` of the target, relatively."""
    return math.isclose(value, target, rel_tol=tolerance, abs_tol=0.0)


def without_labkit(
    function: Callable[[], object], modules: tuple[str, ...], transformers: tuple[str, ...] = ()
) -> object:
    """Call `function` and fail if code of those modules of labkit ran: the point is to write it, not to call it.

    A name that ends in "/" is a room, and stands for all modules in it; `transformers`: rooms of that library. Python's
    profiler sees a call however it was imported; a name that was replaced would only catch some ways.
    """
    files = {str(_PACKAGE / f"{module}.py") for module in modules}
    rooms = tuple(f"{_PACKAGE / module}{os.sep}" for module in modules if module.endswith("/"))
    others = tuple(os.sep + os.path.join("transformers", room, "") for room in transformers)
    called: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        path = frame.f_code.co_filename
        if path in files or path.startswith(rooms):
            called.append(f"labkit's own {frame.f_code.co_name}")
        elif any(room in path for room in others):
            called.append(f"transformers' {frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        value = function()
    finally:
        sys.setprofile(before)
    expect(not called, f"write it yourself: your function called {called[0] if called else ''}")
    return value
