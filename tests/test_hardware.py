"""What the machine says of itself, and what is measured."""

import dataclasses
from pathlib import Path

import pytest
import torch

from labkit import ceilings as ceilings_module
from labkit import devices, hardware
from labkit.measure import Timing, time_op


@pytest.fixture(scope="module")
def ceilings() -> hardware.Ceilings:
    return hardware.measure_ceilings("cpu", min_run_s=0.05)


def test_describe_agrees_with_torch() -> None:
    info = hardware.describe("cpu")
    assert info.kind == "cpu" and info.threads == torch.get_num_threads()
    assert 0 < info.free_bytes <= info.memory_bytes and info.cores >= 1
    assert hardware.detect_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_real_work_stands_near_and_not_far_above_its_ceiling(ceilings: hardware.Ceilings) -> None:
    """Loose, since a neighbour may take half the machine in between; a wrong count of bytes or FLOPs is a factor."""
    a = torch.randn(512, 512)
    flops = 2 * 512**3 / time_op(lambda: a @ a, device="cpu", min_run_s=0.05).median
    assert 0.1 < flops / ceilings.matmul_flops[torch.float32] < 3
    x = torch.ones(2**26)
    read = x.nbytes / time_op(x.sum, device="cpu", min_run_s=0.05).median
    assert 0.1 < read / ceilings.read_bandwidth < 3


def test_the_bandwidth_probe_is_larger_than_the_cache(ceilings: hardware.Ceilings) -> None:
    moved, _ = ceilings.details["read by sum"]
    assert moved >= 4 * (hardware.describe("cpu").cache_bytes or 0)
    assert ceilings.copy_bandwidth == pytest.approx(moved / ceilings.details["copy"][1].median, rel=0.01)


def test_ceilings_are_measured_once_a_process(ceilings: hardware.Ceilings) -> None:
    told: list[str] = []
    assert hardware.measure_ceilings("cpu", progress=told.append) is ceilings and not told


def test_set_threads_sets_what_it_returns() -> None:
    before = torch.get_num_threads()
    try:
        assert hardware.set_threads([1]) == 1 == torch.get_num_threads()
        with pytest.raises(ValueError, match="candidates: got 0"):
            hardware.set_threads([0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "bandwidth", "bf16"),
    [("NVIDIA H200", 4.8e12, 989e12), ("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12), ("NVIDIA L4", 300e9, 121e12)],
)
def test_datasheets(name: str, bandwidth: float, bf16: float) -> None:
    sheet = hardware.datasheet_by_name(name)
    assert sheet.memory_bandwidth == pytest.approx(bandwidth, rel=0.02)
    assert sheet.matmul_flops[torch.bfloat16] == pytest.approx(bf16, rel=0.02) and sheet.source


@pytest.mark.parametrize("candidates", [[0], [10**6], [2**40], [True], 5])
def test_a_thread_count_that_would_end_the_process_is_refused(candidates: object) -> None:
    with pytest.raises(ValueError, match="candidates: got"):
        hardware.set_threads(candidates)


def test_ceilings_refuse_what_would_never_end() -> None:
    for wrong in ({"min_run_s": float("inf")}, {"progress": 5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
            hardware.measure_ceilings("cpu", refresh=True, **wrong)
    assert hardware.measured_dtypes("cpu") == [torch.float32, torch.bfloat16]


def test_no_datasheet_for_a_cpu_or_a_stranger() -> None:
    assert hardware.datasheet("cpu") is None
    assert hardware.datasheet_by_name("Imaginary Accelerator 9000") is None


def test_a_missing_backend_says_why() -> None:
    found = hardware.backends()
    assert found["torch"] is None
    for name, reason in found.items():
        assert reason is None or len(reason) > 20, name


def test_a_ceiling_is_the_best_of_the_thread_counts_and_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def probe(device: torch.device, min_run_s: float, threads: int, tell: object) -> ceilings_module.Probe:
        seen.append(threads)
        torch.set_num_threads(threads)
        slow, fast = Timing(2.0, 2.0, 2.0, 1), Timing(1.0, 1.0, 1.0, 1)
        read, matmul = (fast, slow) if threads == 1 else (slow, fast)
        memory = dict.fromkeys(("read by sum", "read by dot", "copy"), (100, read))
        return memory | {"float32 matmul": (1000, matmul)}

    monkeypatch.setattr(ceilings_module, "_probe", probe)
    monkeypatch.setattr(ceilings_module, "_measured", {})
    monkeypatch.setattr(
        ceilings_module, "describe", lambda device: dataclasses.replace(hardware.describe("cpu"), cores=4)
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        found = hardware.measure_ceilings("cpu")
        assert seen == [1, 4] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert (found.read_bandwidth, found.copy_bandwidth, found.matmul_flops) == (100, 100, {torch.float32: 1000})
    assert found.threads == 1


def test_a_container_s_limit_is_the_memory_that_there_is(tmp_path: Path) -> None:
    total, free = devices._host_memory(tmp_path)  # no such files: the machine's own
    assert 0 < free <= total
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2500\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 400\n")
    assert devices._host_memory(tmp_path) == (3000, 900)
    (tmp_path / "memory.max").write_text("max\n")
    assert devices._host_memory(tmp_path)[0] == total
