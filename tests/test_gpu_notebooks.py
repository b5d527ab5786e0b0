"""What is packed for a machine without a network is whole, small enough, and put together there."""

import json
import os
import subprocess
import sys
import zipfile

import pytest

from labkit.model_files.fetch import downloads_dir
from tools import gpu_notebooks
from tools.gpu_notebooks import PLAN, share_out, split, stow


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OUT", raising=False)
    return tmp_path / "cache"


def test_parts_join_to_the_file_in_the_order_of_their_numbers(tmp_path):
    whole = tmp_path / "model.gguf"
    whole.write_bytes(bytes(range(256)) * 10)
    parts = split(whole, tmp_path, 200)
    assert [part.name for part in parts] == [f"model.gguf.part{i}" for i in range(13)]
    assert b"".join(part.read_bytes() for part in parts) == whole.read_bytes()
    assert max(part.stat().st_size for part in parts) == 200


@pytest.mark.parametrize("limit, groups", [(100, 2), (70, 2), (63, 3)])
def test_groups_hold_every_file_once_and_none_passes_the_limit(tmp_path, limit, groups):
    files = []
    for number, size in enumerate((50, 40, 20, 10, 5)):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(b"x" * size)
    shared = share_out(files, limit)
    assert sorted(file for group in shared for file in group) == files
    assert max(sum(file.stat().st_size for file in group) for group in shared) <= limit
    assert len(shared) == groups
    with pytest.raises(ValueError, match="takes at least 50, the size of 0"):
        share_out(files, 49)


def wheel(folder, name):
    """The smallest wheel that pip installs."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"NAME = {name!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path.name


def carried(tmp_path, number, plan):
    """One of the folders that `pack` makes, with a wheel and a part in it."""
    folder = tmp_path / "carry" / number
    folder.mkdir(parents=True)
    (folder / PLAN).write_text(json.dumps(plan))
    (folder / f"m.gguf.part{int(number) - 1}").write_bytes(number.encode())
    wheel(folder, f"made_up_{number}")
    return folder


def test_folders_may_come_one_after_the_other(tmp_path):
    plan = {n: [f"m.gguf.part{int(n) - 1}", f"made_up_{n}-1.0-py3-none-any.whl"] for n in ("1", "2")}
    first = carried(tmp_path, "1", plan)
    assert stow(tmp_path / "carry") == {"2": plan["2"]}
    for file in first.iterdir():
        file.unlink()
    first.rmdir()
    carried(tmp_path, "2", plan)
    assert stow(tmp_path / "carry") == {}
    assert [path.read_bytes() for path in sorted(downloads_dir().iterdir())] == [b"1", b"2"]


def test_a_run_names_the_folders_that_have_not_come(tmp_path, monkeypatch, capsys):
    carried(tmp_path, "1", {"1": [], "2": ["m.gguf.part1"]})
    monkeypatch.setattr(gpu_notebooks, "CARRY", tmp_path / "carry")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it ran"))
    assert gpu_notebooks.main([]) == 2
    assert f"takes {tmp_path / 'carry' / '2'} too" in capsys.readouterr().err


@pytest.mark.parametrize("out", [True, False])
def test_a_run_fetches_then_runs_with_the_carried_wheels_first(tmp_path, monkeypatch, out):
    carried(tmp_path, "1", {"1": []})
    monkeypatch.setattr(gpu_notebooks, "CARRY", tmp_path / "carry")
    if out:
        monkeypatch.setenv("OUT", str(tmp_path / "out"))
    commands, real = [], subprocess.run

    def note(command, **options):
        if "labkit" not in command:
            return real(command, **options)
        probe = [sys.executable, "-c", "import made_up_1; print(made_up_1.NAME)"]
        assert real(probe, env=options["env"], capture_output=True, text=True).stdout == "made_up_1\n"
        commands.append(command[3:])
        return subprocess.CompletedProcess(command, returncode=int(command[3] == "run"))

    monkeypatch.setattr(subprocess, "run", note)
    assert gpu_notebooks.main(["run", "01"]) == 1
    kept = ["--output", f"{tmp_path}/out/gpu-notebooks.md", "--save", f"{tmp_path}/out/notebooks"] if out else []
    assert commands == [["fetch"], ["run", "01", *kept]]


def test_nothing_that_torch_or_transformers_brings_is_carried():
    assert {"torch", "transformers", "triton"}.isdisjoint(gpu_notebooks.NEEDED)
    assert gpu_notebooks.NOT_CARRIED.isdisjoint(gpu_notebooks.NEEDED)


def test_git_ignores_what_is_carried():
    ignored = subprocess.run(["git", "check-ignore", ".carry/1/x"], cwd=gpu_notebooks.ROOT, capture_output=True)
    assert ignored.returncode == 0 or not os.path.isdir(gpu_notebooks.ROOT / ".git")
