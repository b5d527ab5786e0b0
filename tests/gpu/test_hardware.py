"""The measured ceilings on a GPU: sane beside the datasheet, repeatable, and of the device that was asked for."""

import pytest
import torch

from labkit.hardware import datasheet, describe, measure_ceilings
from labkit.measure import peak_memory

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ceilings(device: torch.device) -> object:
    return measure_ceilings(device)


@pytest.fixture(scope="module")
def sheet(device: torch.device) -> object:
    found = datasheet(device)
    if found is None:
        pytest.skip(f"{describe(device).name} has no row in data/gpus.yaml")
    return found


def test_bandwidth_is_near_the_datasheet_and_never_above_it(ceilings: object, sheet: object) -> None:
    for bandwidth in (ceilings.read_bandwidth, ceilings.copy_bandwidth):
        assert 0.5 * sheet.memory_bandwidth < bandwidth < 1.05 * sheet.memory_bandwidth


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matmul_rate_is_near_the_datasheet_and_never_above_it(
    ceilings: object, sheet: object, dtype: torch.dtype
) -> None:
    if dtype not in sheet.matmul_flops:
        pytest.skip(f"{sheet.name} has no {dtype} rate in its datasheet")
    assert 0.5 * sheet.matmul_flops[dtype] < ceilings.matmul_flops[dtype] < 1.05 * sheet.matmul_flops[dtype]


def test_a_second_measurement_agrees(ceilings: object, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("a CPU's neighbours move it")
    again = measure_ceilings(device, refresh=True)
    assert again.read_bandwidth == pytest.approx(ceilings.read_bandwidth, rel=0.25)
    assert again.matmul_flops[torch.bfloat16] == pytest.approx(ceilings.matmul_flops[torch.bfloat16], rel=0.25)


def test_half_precision_outruns_float32_on_tensor_cores(ceilings: object, device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("needs Ampere or later")
    assert ceilings.matmul_flops[torch.bfloat16] > 2 * ceilings.matmul_flops[torch.float32]


def test_describe_says_what_the_driver_says(device: torch.device) -> None:
    info = describe(device)
    assert (info.kind, info.device) == (device.type, device)
    if device.type == "cuda":
        assert info.memory_bytes == torch.cuda.mem_get_info(device)[1]
        assert info.name == torch.cuda.get_device_name(device)


def test_peak_memory_counts_the_bytes_of_a_tensor_that_is_gone_again(device: torch.device) -> None:
    def two_tensors_at_once() -> None:
        first = torch.empty(2**20, dtype=torch.float32, device=device)
        second = torch.empty_like(first)
        del first, second

    assert peak_memory(two_tensors_at_once, device=device) == 2 * 2**22
