"""`gpu-check` keeps what it measured whatever a section does, and never passes a CPU's run off as a GPU's."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from labkit.__main__ import main
from labkit.cli import gpu_check, gpu_results
from labkit.cli.gpu_results import RECORDED, SELF_TEST, has_run_on_gpu, recorded_runs, source_hashes
from labkit.cli.gpu_sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parents[1]

# Sections that a test needs, as a module on the child's path.
_SECTIONS = """
import json, os, pathlib, signal, subprocess, sys, time

def good(recorder):
    recorder.record("answer", 42)
    recorder.target("share", 0.5, at_least=0.65)

def raises(recorder):
    recorder.record("before", 1)
    raise RuntimeError("the kernel is wrong")

def dies(recorder):
    recorder.record("before", 1)
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(recorder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    recorder.record("child", child.pid)
    time.sleep(60)

def not_json(recorder):
    recorder.record("before", 1)
    recorder.record("rate", float("nan"))

def stamps(recorder):
    recorder.record("at", time.time_ns())

def looks(recorder):
    recorder.record("seen", sorted(json.loads(pathlib.Path(os.environ["RESULT_FILE"]).read_text())["sections"]))
"""


@pytest.fixture
def section(tmp_path, monkeypatch):
    """Makes a Section of one of the functions above."""
    (tmp_path / "made_up_sections.py").write_text(_SECTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name, **fields: Section(name, f"made_up_sections:{name}", **fields)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No setting of the person who runs the tests reaches them."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    for name in ("SECTION", "OUT"):
        monkeypatch.delenv(name, raising=False)


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def on_disk(path):
    return json.loads(path.read_text())


# One section


def test_a_section_that_passes_leaves_results_targets_and_hashes(section):
    result = gpu_check.run_section(section("good", sources=("labkit/_paths.py",)), kind="cpu", timeout_s=30)
    assert (result["status"], result["results"], result["says"]) == ("ok", {"answer": 42}, "")
    assert result["targets"] == [{"name": "share", "value": 0.5, "at_least": 0.65, "met": False}]
    assert result["sources"] == source_hashes(["labkit/_paths.py"])


@pytest.mark.parametrize(
    "name, status, says",
    [
        ("raises", "failed (1)", "RuntimeError: the kernel is wrong"),
        ("dies", "failed (-11)", ""),
        ("not_json", "failed (1)", "ValueError: Out of range float values"),
    ],
)
def test_a_section_that_fails_says_why_and_keeps_what_it_had(section, name, status, says):
    result = gpu_check.run_section(section(name), kind="cpu", timeout_s=30)
    assert (result["status"], result["results"]) == (status, {"before": 1})
    assert says in result["says"].strip().splitlines()[-1] if says else True


def test_a_section_that_hangs_is_ended_with_all_that_it_started(section):
    begin = time.monotonic()
    result = gpu_check.run_section(section("hangs"), kind="cpu", timeout_s=3)
    assert result["status"] == "timed out"
    assert time.monotonic() - begin < 20
    child = result["results"]["child"]
    for _ in range(50):  # a killed process stays listed until its parent, init by then, has collected it
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the section's own child outlived it")


# A run of several


def test_a_failed_section_stops_no_other_and_each_is_written_at_once(section, tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    monkeypatch.setenv("RESULT_FILE", str(path))
    chosen = [section("raises"), section("good"), section("looks")]
    run = gpu_check.run_sections(chosen, path, chip="cpu", kind="cpu")
    assert [s["status"] for s in run["sections"].values()] == ["failed (1)", "ok", "ok"]
    assert run["sections"]["looks"]["results"]["seen"] == ["good", "raises"]
    assert on_disk(path) == run
    assert not list(tmp_path.glob("*.partial"))


def test_what_no_time_is_left_for_is_written_down_as_not_run(section, tmp_path):
    run = gpu_check.run_sections([section("good")], tmp_path / "run.json", chip="cpu", kind="cpu", limit_s=0.5)
    assert run["sections"]["good"]["status"] == "not run"


def test_a_section_run_again_keeps_the_others(section, tmp_path):
    path = tmp_path / "run.json"
    gpu_check.run_sections([section("good"), section("stamps")], path, chip="cpu", kind="cpu")
    first = on_disk(path)["sections"]
    again = gpu_check.run_sections([section("stamps")], path, chip="cpu", kind="cpu")["sections"]
    assert again["good"] == first["good"]
    assert again["stamps"]["results"]["at"] > first["stamps"]["results"]["at"]


def test_a_file_of_another_machine_is_not_written_over(section, tmp_path):
    path = tmp_path / "run.json"
    gpu_check.run_sections([section("good")], path, chip="cpu", kind="cpu")
    before = path.read_text()
    with pytest.raises(ValueError, match="holds a run on cpu"):
        gpu_check.run_sections([section("good")], path, chip="NVIDIA H200", kind="cuda")
    assert path.read_text() == before


def test_the_summary_names_the_error_and_the_missed_target(section, tmp_path):
    run = gpu_check.run_sections([section("raises"), section("good")], tmp_path / "r.json", chip="cpu", kind="cpu")
    text = gpu_check.summary(run, ["raises", "good"])
    assert text.startswith(SELF_TEST)
    assert "RuntimeError: the kernel is wrong" in text
    assert "share" in text and "MISSED" in text


# The command


@without_gpu
def test_without_a_gpu_it_says_so_in_one_sentence(capsys):
    assert main(["gpu-check"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "no CUDA GPU" in printed.err


def test_an_unknown_section_is_refused_with_the_known_ones(capsys, monkeypatch):
    monkeypatch.setenv("SECTION", "decoder_9b")
    assert main(["gpu-check", "--allow-cpu"]) == 2
    assert "decoder_8b" in capsys.readouterr().err


def test_sections_are_chosen_in_their_own_order():
    assert [s.name for s in gpu_check.choose(["decoder_1b", "environment"])] == ["environment", "decoder_1b"]
    assert gpu_check.choose([]) == list(SECTIONS)


@without_gpu
@pytest.mark.slow
def test_sections_run_at_tiny_shapes_and_are_labelled_a_self_test(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a device lock of its own: figures are not what is tested here
    monkeypatch.setenv(
        "SECTION",
        "environment,ceilings,tests,decoder_8b,speculative,ladder,"
        "quantized_linear,decode_attention,flash_attention,eight_bit",
    )  # decoder_1b differs in its shape only
    command = [sys.executable, "-m", "labkit", "gpu-check", "--allow-cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = on_disk(tmp_path / "gpu-check-selftest-cpu.json")
    assert (run["label"], run["kind"]) == (SELF_TEST, "cpu")
    assert list(run["sections"]) == [section.name for section in SECTIONS if section.name != "decoder_1b"]
    decoder = run["sections"]["decoder_8b"]["results"]
    reached = decoder["step_bytes"] * decoder["eager_tokens_per_second"]
    assert decoder["bandwidth"]["reached"] == pytest.approx(reached)
    assert run["sections"]["tests"]["results"]["counts"]["passed"] >= 5
    assert not list((ROOT / "data" / "gpu_results").glob("*selftest*"))


@without_gpu
def test_a_self_test_is_refused_a_place_among_the_results(capsys):
    target = gpu_results.RESULTS / "2030-01-01-nvidia.json"
    assert main(["gpu-check", "--allow-cpu", "--section", "environment", "--output", str(target)]) == 2
    assert "self-test" in capsys.readouterr().err
    assert not target.exists()


def test_where_a_run_is_written(tmp_path, monkeypatch):
    on_gpu = gpu_check.default_output("NVIDIA H200", cuda=True)
    assert on_gpu.parent == gpu_results.RESULTS and on_gpu.name.endswith("-nvidia-h200.json")
    assert gpu_results.RESULTS not in gpu_check.default_output("cpu", cuda=False).parents
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu_check.default_output("NVIDIA H200", cuda=True).parent == tmp_path


# What the files in data/gpu_results say


def write_run(folder, status="ok", label=RECORDED, kind="cuda", sources=None):
    folder.mkdir(exist_ok=True)
    section = {"status": status, "sources": sources}
    (folder / "run.json").write_text(json.dumps({"label": label, "kind": kind, "sections": {"tests": section}}))


def test_a_source_has_run_on_a_gpu_only_as_the_text_that_ran(tmp_path):
    (tmp_path / "kernel.py").write_text("one")
    results = tmp_path / "results"
    write_run(results, sources=source_hashes(["*.py"], tmp_path))
    assert has_run_on_gpu("kernel.py", folder=results, root=tmp_path)
    (tmp_path / "kernel.py").write_text("another")
    assert not has_run_on_gpu("kernel.py", folder=results, root=tmp_path)
    with pytest.raises(ValueError, match=r"source: got 'kernel_2.py'"):
        has_run_on_gpu("kernel_2.py", folder=results, root=tmp_path)


@pytest.mark.parametrize("fields", [{"status": "failed (1)"}, {"label": SELF_TEST}, {"kind": "cpu"}])
def test_a_failed_section_or_a_self_test_proves_nothing(tmp_path, fields):
    (tmp_path / "kernel.py").write_text("one")
    write_run(tmp_path / "results", sources=source_hashes(["*.py"], tmp_path), **fields)
    assert not has_run_on_gpu("kernel.py", folder=tmp_path / "results", root=tmp_path)


def test_only_gpu_runs_are_kept_as_results():
    assert len(recorded_runs()) == len(list(gpu_results.RESULTS.glob("*.json")))


def test_what_has_not_run_on_a_gpu_stands_in_the_pending_list():
    pending = (gpu_results.RESULTS / "PENDING.md").read_text()
    passed = {name for run in recorded_runs() for name, s in run["sections"].items() if s["status"] == "ok"}
    missing = {section.name for section in SECTIONS} - passed
    assert [name for name in sorted(missing) if f"SECTION={name}" not in pending] == []


def test_the_readme_says_which_kernels_have_not_run_on_a_gpu():
    readme = " ".join((ROOT / "README.md").read_text().split())
    for kernel in sorted((ROOT / "labkit" / "kernels").glob("*/triton.py")):
        said = re.search(rf"Triton kernels \([^)]*`{kernel.parent.name}`[^)]*\)[^.]*?: not yet run on a GPU", readme)
        assert bool(said) != has_run_on_gpu(kernel.relative_to(ROOT).as_posix()), kernel


def test_all_sections_fit_into_the_limit():
    assert all(0 < section.timeout_s <= 45 for section in SECTIONS)
    assert sum(section.timeout_s for section in SECTIONS) <= gpu_check.LIMIT_S
    assert len({section.name for section in SECTIONS}) == len(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_section_names_a_function_and_sources_that_exist(section):
    module, function = section.measure.split(":")
    source = (ROOT / module.replace(".", os.sep)).with_suffix(".py").read_text()
    assert f"\ndef {function}(recorder: Recorder)" in source
    # A kernel folder may still be empty; all other patterns find files.
    assert [p for p in section.sources if "kernels" not in p and not source_hashes([p])] == []


@pytest.mark.parametrize("text", ["[1", "[]", '{"kind": "cpu", "chip": "cpu"}', '{"kind": "cpu", "sections": 5}'])
def test_a_file_that_gpu_check_did_not_write_is_left_alone(text, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--output: got .*mine.json, which gpu-check did not write"):
        gpu_check.run_sections([], path, chip="cpu", kind="cpu")
    assert path.read_text() == text
