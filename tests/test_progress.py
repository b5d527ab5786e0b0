"""What a long step shows: a bar in a terminal, few whole lines elsewhere, nothing for a short one."""

import io
import sys

import pytest

from labkit import _progress
from labkit._progress import progress, say


class Clock:
    """A time that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(_progress.time, "monotonic", clock.monotonic)
    return clock


def test_a_short_step_says_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("quantizing", 4, "layers") as update:
        for done in range(1, 5):
            clock.now += 2.4
            update(done)
    assert capsys.readouterr() == ("", "")


def test_a_long_one_says_a_line_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("GPTQ, llama", 30, "layers") as update:
        for done in range(1, 31):
            clock.now += 1.0
            update(done)
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [f"GPTQ, llama: {done} of 30 layers" for done in (10, 20, 30)]


def test_bytes_are_shown_in_megabytes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("model", 300_000_000) as update:
        clock.now += 10
        update(150_000_000)
    assert capsys.readouterr().err == "model: 150 of 300 MB\n"


def test_a_terminal_gets_a_bar_that_is_moved_to_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    class Bar(_progress.tqdm):
        def __init__(self, **options: object) -> None:
            super().__init__(**options, file=io.StringIO())
            bars.append((self, options))

    monkeypatch.setattr(_progress, "tqdm", Bar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("GPTQ", 30, "layers") as update:
        for done in (1, 2, 7):
            update(done)
            assert bars[0][0].n == done
    bar, options = bars[0]
    assert (bar.total, bar.unit, bar.leave, options["unit_scale"], options["delay"]) == (
        30,
        "layers",
        False,
        False,
        1.0,
    )
    assert bar.disable or bar.n == 7


def test_an_error_in_the_step_comes_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), progress("x", 1, "layers"):
        raise KeyError("inside")
    assert capsys.readouterr().err == ""


def test_say_writes_one_line_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("loading")
    assert capsys.readouterr() == ("", "loading\n")
