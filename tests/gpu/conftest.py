"""What the GPU tests share: the device, or a reason to skip."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The CUDA device. `gpu-check --allow-cpu` runs these tests on the CPU, to test the tests."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if os.environ.get("LABKIT_GPU_TESTS_ON_CPU"):
        torch.set_num_threads(1)
        return torch.device("cpu")
    pytest.skip("needs a CUDA GPU: run `make gpu-check` on one")
