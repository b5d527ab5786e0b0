"""The Makefile does each step once, goes on after a failure, and starts what it says: by a Python that only listens."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "{log}"
case "$*" in *"$FAIL_ON"*) [ -z "$FAIL_ON" ] || exit 3 ;; esac
"""

# Of the make that runs these tests; the one under test must not inherit them.
MAKE_VARIABLES = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "VENV", "TEST_ARGS", "LAB_ARGS"}

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


class Project:
    """A copy of the Makefile and what it reads, with an environment whose Python writes down how it was called."""

    def __init__(self, folder: Path, venv: str) -> None:
        self.folder, self.venv, self.log = folder, venv, folder / "calls.log"
        for name in ("Makefile", "requirements.txt", "constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        for name in ("labkit", "tools", "tests", "notebooks"):
            (folder / name).mkdir()
        shutil.copy(ROOT / "tools" / "jupyterlab_overrides.json", folder / "tools")
        python = folder / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PYTHON.format(log=self.log))
        python.chmod(0o755)

    def make(self, *arguments: str, fail_on: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        self.log.unlink(missing_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
        return subprocess.run(
            ["make", f"VENV={self.venv}", *arguments],
            cwd=self.folder,
            env=inherited | {"FAIL_ON": fail_on} | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        """What Python was called with since the last `make`, without the question whether pip is there."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line != "-m pip --version"]


INSTALL = "-m pip install -r requirements.txt"
EDITABLE = "-m pip install --quiet --no-deps --no-build-isolation -e ."
FETCH = "-m labkit fetch"


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path, "env")


def newer(path: Path) -> None:
    """Make a file a minute newer than now, past any stamp."""
    os.utime(path, (time.time() + 60,) * 2)


def test_setup_installs_once_and_checks_the_model_each_time(project):
    assert project.make("setup").returncode == 0
    assert project.calls() == [INSTALL, EDITABLE, FETCH]
    overrides = project.folder / project.venv / "share" / "jupyter" / "lab" / "settings" / "overrides.json"
    assert json.loads(overrides.read_text())["@jupyterlab/apputils-extension:notification"]["fetchNews"] == "false"
    assert project.make("setup").returncode == 0
    assert project.calls() == [FETCH]


@pytest.mark.parametrize(
    ("name", "again"),
    [
        ("requirements.txt", [INSTALL, EDITABLE, FETCH]),
        ("constraints.txt", [INSTALL, EDITABLE, FETCH]),
        ("pyproject.toml", [EDITABLE, FETCH]),
    ],
)
def test_a_changed_file_repeats_what_reads_it(project, name, again):
    project.make("setup")
    newer(project.folder / name)
    project.make("setup")
    assert project.calls() == again


@pytest.mark.parametrize(
    ("fails", "rest"), [("install -r", [INSTALL, EDITABLE, FETCH]), ("install --quiet", [EDITABLE, FETCH])]
)
def test_setup_goes_on_from_the_step_that_failed(project, fails, rest):
    stopped = project.make("setup", fail_on=fails)
    assert stopped.returncode != 0
    assert "Troubleshooting" in stopped.stderr
    assert FETCH not in project.calls()
    assert project.make("setup").returncode == 0
    assert project.calls() == rest


def test_an_environment_whose_python_has_gone_is_made_again(project):
    project.make("setup")
    python = project.folder / "env" / "bin" / "python"
    python.rename(python.with_name("kept"))
    assert "No Python" in project.make("setup", "PYTHON=/no/python").stderr
    python.with_name("kept").rename(python)


def test_a_missing_or_unfit_python_is_said_in_one_line(project):
    unfit = project.folder / "python3.12"
    unfit.write_text("#!/bin/sh\nexit 1\n")
    unfit.chmod(0o755)
    shutil.rmtree(project.folder / "env")
    said = project.make("setup", f"PYTHON={unfit}")
    assert said.returncode != 0
    assert f"No Python from 3.11 to 3.13 that has venv at PYTHON={unfit}" in said.stderr
    assert not (project.folder / "env").exists()


def test_lab_listens_on_this_machine_with_a_token_and_opens_the_first_notebook(project):
    assert project.make("lab", "LAB_ARGS=--no-browser").returncode == 0
    start = project.calls()[-1]
    assert start.startswith("-m jupyterlab --ip=127.0.0.1 ")
    assert "default_url=/lab/tree/notebooks/00_start_here.ipynb" in start and start.endswith("--no-browser")
    assert "token" not in start.lower() and "password" not in start.lower()


def test_test_runs_every_part_and_names_the_ones_that_failed(project):
    assert project.make("test").returncode == 0
    parts = [call for call in project.calls() if call.startswith("-m pytest")]
    assert len(parts) == 3
    assert "--nbval" in parts[1] and " notebooks tests/notebooks" in parts[1]
    assert parts[2].endswith("tests/browser")

    failed = project.make("test", fail_on="--nbval")
    assert failed.returncode != 0
    assert "failures in test-notebooks." in failed.stderr
    assert [call for call in project.calls() if call.startswith("-m pytest")] == parts


def test_gpu_check_needs_no_set_up(project):
    bare = project.folder / "env" / "bin" / "python"
    assert project.make("gpu-check", f"PYTHON={bare}", "VENV=nowhere").returncode == 0
    assert project.calls() == ["-m labkit gpu-check"]


def test_clean_removes_its_own_environment_only(tmp_path):
    for venv, kept in ((".venv", False), ("env", True)):
        folder = tmp_path / venv
        folder.mkdir()
        project = Project(folder, venv)
        project.make("setup")
        said = project.make("clean", LABKIT_CACHE="/the/cache")
        assert "/the/cache" in said.stdout
        assert (folder / venv / "bin" / "python").exists() is kept
        assert not (folder / venv / ".labkit").exists()
