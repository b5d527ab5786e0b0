"""`make quantlibs` installs each environment once, and one that fails does not keep the other from being made."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTS = {".venv-quantlibs": "requirements-quantlibs.txt", ".venv-legacy": "requirements-legacy.txt"}
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    "-m pip --version") exit 0 ;;
    "-m pip install -r "*) echo "$5" >> "{log}"; [ "$5" != "$FAIL_ON" ] ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def make(tmp_path):
    """Runs make in a folder with both environments, whose Pythons write down what they were to install."""
    for name in ("Makefile", *LISTS.values()):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in LISTS:
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON.format(log=tmp_path / "log"))
        python.chmod(0o755)

    def run(*arguments, fail_on=""):
        (tmp_path / "log").write_text("")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "LABKIT_"))}
        done = subprocess.run(
            ["make", "quantlibs", *arguments],
            cwd=tmp_path,
            env=kept | {"FAIL_ON": fail_on},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, (tmp_path / "log").read_text().split()

    return run


def test_each_list_is_installed_once_and_again_when_it_changes(make, tmp_path):
    done, installed = make()
    assert done.returncode == 0 and installed == list(LISTS.values())
    assert "AutoGPTQ and AutoAWQ are in .venv-legacy" in done.stdout
    assert make()[1] == []
    os.utime(tmp_path / "requirements-legacy.txt", (time.time() + 60,) * 2)
    assert make()[1] == ["requirements-legacy.txt"]


def test_a_failure_says_what_to_do_and_leaves_the_other_environment_made(make):
    done, installed = make(fail_on="requirements-quantlibs.txt")
    assert done.returncode != 0 and installed == list(LISTS.values())
    assert "requirements-quantlibs.txt was not installed into .venv-quantlibs" in done.stderr
    assert "run 'make quantlibs' again" in done.stderr
    assert make()[1] == ["requirements-quantlibs.txt"]


def test_without_python_3_11_the_first_environment_is_made_and_the_second_says_why(make, tmp_path):
    shutil.rmtree(tmp_path / ".venv-legacy")
    done, installed = make("PYTHON311=/no/python3.11")
    assert done.returncode != 0 and installed == ["requirements-quantlibs.txt"]
    assert "need Python 3.11 with venv, and /no/python3.11 is none" in done.stderr


def test_lists_are_pinned_to_the_version_and_share_the_courses_torch():
    torch = next(line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch=="))
    for name in LISTS.values():
        lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        assert torch in lines
        assert [line for line in lines if "==" not in line.partition(";")[0]] == []
