"""What the machine says of itself, and what is measured."""

import pytest
import torch

from labkit import hardware
from labkit.measure import time_op


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


def test_no_datasheet_for_a_cpu_or_a_stranger() -> None:
    assert hardware.datasheet("cpu") is None
    assert hardware.datasheet_by_name("Imaginary Accelerator 9000") is None


def test_a_missing_backend_says_why() -> None:
    found = hardware.backends()
    assert found["torch"] is None
    for name, reason in found.items():
        assert reason is None or len(reason) > 20, name
