"""The tests marked `gpu`, outcome by outcome."""

import os

from labkit.cli.gpu_results import ROOT
from labkit.cli.gpu_sections import Recorder

_KEPT_CHARS = 2000


class _Outcomes:
    """A pytest plugin that records each test as it ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: object) -> None:
        # A test is its call; a setup or teardown counts only where it did not pass.
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            says = report.longreprtext[-_KEPT_CHARS:] if report.outcome == "failed" else ""
            outcome = {"outcome": report.outcome, "seconds": round(report.duration, 3), "says": says}
            self.recorder.record(report.nodeid, outcome)


def gpu_tests(recorder: Recorder) -> None:
    """Run `tests/gpu`. Errors: RuntimeError if a test failed, or if none ran on the device."""
    import pytest

    if recorder.tiny:
        os.environ["LABKIT_GPU_TESTS_ON_CPU"] = "1"
    outcomes = _Outcomes(recorder)
    # Without the project's own options, which ask for a newer pytest than a bare machine may have.
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-W", "ignore"]
    arguments = ["-q", "-m", "gpu", *options, str(ROOT / "tests" / "gpu")]
    code = pytest.main(arguments, plugins=[outcomes])
    recorder.record("counts", outcomes.counts)
    recorder.record("pytest_exit_code", int(code))
    if code != 0 or not outcomes.counts["passed"]:
        raise RuntimeError(f"tests: {outcomes.counts}, pytest ended with {int(code)}")
