"""Exercises: `check(name, answer)` tests an answer against properties, `hint(name)` helps, `status()` tells how far.

How a notebook uses them. The cell tagged `exercise:<name>` holds the stub and nothing else; the cell after it is
`check("<name>", <answer>)`. `SOLUTIONS["<name>"]` in `tests/solutions/chNN.py` is the text that replaces the tagged
cell when a chapter is run with its solutions, so that stub and solution define the same names.
"""

from labkit import _check
from labkit.exercises import ch01, ch02, ch03, ch04, ch05, ch06
from labkit.exercises._exercise import Exercise, Failed, NotAttempted
from labkit.exercises._limit import within
from labkit.exercises._session import NOT_ATTEMPTED, CheckResult, Hints, Session, Status

__all__ = ["EXERCISES", "CheckResult", "check", "hint", "status"]

EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise for chapter in (ch01, ch02, ch03, ch04, ch05, ch06) for exercise in chapter.EXERCISES
}
_this_session = Session()

# Of the processor's time; the longest check of a right answer takes a tenth of it.
_LIMIT_S = 60.0
_ENDLESS = "it does not come to its end: no right answer computes for a minute. Does a loop never end?"


def _find(name: str) -> Exercise:
    return EXERCISES[_check.choice("name", name, list(EXERCISES))]


def check(name: str, answer: object) -> CheckResult:
    """Test an answer; the result says what holds, or the first property that does not.

    An untouched stub (None, `...`, a function that returns nothing or raises NotImplementedError) is "not attempted
    yet". Nothing that an answer does is raised into the notebook, an interrupt apart, and one that computes without an
    end is stopped. Errors: ValueError for an unknown
    name.
    """
    exercise = _find(name)
    try:
        result = CheckResult(name, True, within(_LIMIT_S, lambda: exercise.test(answer), _ENDLESS))
    except NotAttempted:
        result = CheckResult(name, None, NOT_ATTEMPTED)
    except Failed as failure:
        result = CheckResult(name, False, str(failure))
    except (Exception, SystemExit) as error:
        result = CheckResult(name, False, f"the check stopped with {type(error).__name__}: {error}")
    return _this_session.record(result)


def hint(name: str) -> Hints:
    """One hint more at each call, from a nudge to nearly the answer. Errors: ValueError for an unknown name."""
    return _this_session.next_hint(_find(name))


def status() -> Status:
    """Every exercise: passed, tried or not, and hints taken, in this session."""
    return _this_session.status(list(EXERCISES.values()))
