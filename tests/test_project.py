"""What stands around the package agrees with itself: pins, environments, licence, citation, commands."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import labkit
from tools.constraints import canonical, pinned

ROOT = Path(__file__).resolve().parents[1]
IGNORED_FOLDERS = {
    ".git",
    ".venv",
    ".venv-quantlibs",
    ".venv-legacy",
    ".pytest_cache",
    ".ruff_cache",
    ".hypothesis",
    ".labkit-cache",
    "__pycache__",
}
IGNORED_FOLDERS |= {"artifacts", "build", "labkit.egg-info", ".ipynb_checkpoints"}
# Where packages come from is the reader's business: pip's and conda's own settings say it.
INDEX_HOST = re.compile(
    r"pypi\.\w|pythonhosted\.\w|registry\.npmjs|deb\.debian|download\.pytorch|anaconda\.\w|index-url[ =]+http"
)


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict:
    return tomllib.loads(text("pyproject.toml"))


def requirements() -> list[Requirement]:
    lines = (line.split(" #")[0].strip() for line in text("requirements.txt").splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]


def project_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        if path.is_file() and not IGNORED_FOLDERS.intersection(path.relative_to(ROOT).parts):
            yield path


def test_every_requirement_is_pinned_exactly():
    assert [str(r) for r in requirements() if not re.fullmatch(r"==\d[\w.]*", str(r.specifier))] == []
    assert "-c constraints.txt" in text("requirements.txt").splitlines()


def test_constraints_pin_no_direct_requirement_twice():
    pins = pinned(ROOT / "constraints.txt")
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    assert len(pins) == len(lines)
    assert pins.keys() & pinned(ROOT / "requirements.txt").keys() == set()


def test_every_pin_installs_on_the_first_release_of_each_supported_python():
    """A distribution's Python may be years old: Debian 12 has 3.11.2, which a pin for 3.11.5 and up stops."""
    pins = pinned(ROOT / "requirements.txt") | pinned(ROOT / "constraints.txt")
    for found in distributions():
        takes = found.metadata.get("Requires-Python")
        if takes and canonical(found.metadata["Name"]) in pins:
            for release in ("3.11.0", "3.12.0", "3.13.0"):
                assert SpecifierSet(takes).contains(release), f"{found.metadata['Name']} {found.version} takes {takes}"


def test_package_ranges_contain_the_pins():
    pins = pinned(ROOT / "requirements.txt")
    ranges = [Requirement(line) for line in project()["project"]["dependencies"]]
    assert {
        r.name: pins.get(canonical(r.name)) for r in ranges if pins.get(canonical(r.name), "") not in r.specifier
    } == {}


def test_conda_installs_the_same_requirements():
    environment = yaml.safe_load(text("environment.yml"))
    assert {"pip": ["-r requirements.txt"]} in environment["dependencies"]
    assert conda_python(environment) in SpecifierSet(project()["project"]["requires-python"])


def test_binder_agrees_with_the_requirements():
    environment = yaml.safe_load(text("binder/environment.yml"))
    pins = pinned(ROOT / "requirements.txt")
    versions = dict(line.split("=") for line in environment["dependencies"] if "=" in line)
    assert versions["pytorch-cpu"] == pins["torch"]
    assert versions["numpy"] == pins["numpy"]
    assert conda_python(environment) in SpecifierSet(project()["project"]["requires-python"])
    assert "pip install --no-cache-dir -r requirements.txt" in text("binder/postBuild")


def conda_python(environment: dict) -> str:
    return next(line for line in environment["dependencies"] if str(line).startswith("python=")).split("=")[1]


def test_pre_commit_runs_the_pinned_ruff():
    (repo,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert repo["rev"] == f"v{pinned(ROOT / 'requirements.txt')['ruff']}"


def test_workflow_tests_supported_pythons_by_the_same_script():
    job = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]["test"]
    supported = SpecifierSet(project()["project"]["requires-python"])
    assert [v for v in job["strategy"]["matrix"]["python"] if v not in supported] == []
    assert any(".ci/run" in step.get("run", "") for step in job["steps"])


@pytest.mark.parametrize("name", [".ci/run", "binder/postBuild", "binder/start"])
def test_scripts_can_be_run(name):
    assert (ROOT / name).stat().st_mode & 0o100
    assert subprocess.run(["bash", "-n", str(ROOT / name)]).returncode == 0


def test_no_file_names_a_package_index():
    named = {}
    for path in project_files():
        try:
            found = INDEX_HOST.search(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if found:
            named[str(path.relative_to(ROOT))] = found[0]
    assert named == {}


@pytest.mark.parametrize("host", ["pypi" + ".org", "files.pythonhosted" + ".org", "conda.anaconda" + ".org"])
def test_an_index_would_be_found(host):
    assert INDEX_HOST.search(f"pip install --index https://{host}/simple labkit")


def test_licence_is_apache_2_everywhere():
    assert "Apache License" in text("LICENSE") and "END OF TERMS AND CONDITIONS" in text("LICENSE")
    assert project()["project"]["license"] == yaml.safe_load(text("CITATION.cff"))["license"] == "Apache-2.0"


def test_citation_is_complete():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "version"} <= citation.keys()
    assert citation["version"] == labkit.__version__


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", text("Makefile"), flags=re.MULTILINE))


def test_make_has_the_promised_targets():
    promised = {"setup", "lab", "test", "bench", "gpu-check", "gpu-notebooks", "notebooks", "lint", "clean"}
    assert promised <= make_targets()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "Makefile", ".ci/run"])
def test_every_make_command_written_down_exists(name):
    written = set(re.findall(r"(?:`|^\s*|&& )make ([a-z]+(?:-[a-z]+)*)", text(name), flags=re.MULTILINE))
    assert written - make_targets() == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(name):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text(name))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_readme_maps_every_notebook():
    mapped = set(re.findall(r"notebooks/([\w.]+\.ipynb)", text("README.md")))
    assert {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} <= mapped
