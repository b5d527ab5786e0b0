"""Every kernel compiled for every chip, without one of them; and the faults that this finds are found.

The compiler runs in a process of its own, where Triton does not interpret.
"""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.kernels import aot

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

_FAULTY = """
import json
from dataclasses import asdict, replace
from labkit.kernels import aot
case = next(case for case in aot.cases() if case.name.startswith("W4A16"))
wide = {**case.constants, "split": False, "block_n": 128, "block_m": 128}
faults = {
    "trap": (replace(case, constants=wide, num_warps=8), 100),
    "spills": (replace(case, constants=wide, num_warps=4), 80),
    "shared": (replace(case, constants=wide, num_stages=6, spill_bytes=10**6), 86),
    "error": (replace(case, constants={**case.constants, "block_m": 48}), 90),
    "none": (case, 90),
}
print(json.dumps({name: aot.compile_case(*fault).problem(fault[0]) for name, fault in faults.items()}))
"""


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=ENVIRONMENT | {"TRITON_CACHE_DIR": str(cache)},
        timeout=300,
    )


def children_seconds() -> float:
    """Processor time of the processes that this one started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_every_kernel_compiles_for_every_chip_and_nothing_spills(tmp_path: Path) -> None:
    begin = children_seconds()
    ran = run(tmp_path, "-m", "labkit.kernels.aot")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line for line in ran.stdout.splitlines() if re.search(r"\bsm_\d+\b", line)]
    assert {re.search(r"\bsm_(\d+)\b", row)[1] for row in rows} == {"80", "86", "89", "90", "100", "120"}
    kernels = ("W4A16", "W8A16", "split-K", "dequantize", "decode_attention int4", "combines", "kv_quantize int4")
    assert all(kernel in ran.stdout for kernel in kernels)
    assert len(rows) <= 60 and len(rows) % 6 == 0
    # Of computing, which a busy neighbour does not lengthen.
    assert children_seconds() - begin < 150


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ran = run(tmp_path_factory.mktemp("triton"), "-c", _FAULTY)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("trap", "compiled to a trap"),
        ("spills", r"\d+ bytes a thread spill; at most 0 are allowed"),
        ("shared", r"\d+ bytes of shared memory; sm_86 has 101376"),
        ("error", "CompilationError: "),
        ("none", "^$"),
    ],
)
def test_a_fault_is_found(fault: str, says: str, problems: dict[str, str]) -> None:
    assert re.search(says, problems[fault]), problems


def test_a_chip_takes_all_of_its_shared_memory_and_not_a_byte_more() -> None:
    case = aot.Case("kernel", None, {}, {})
    for capability, size in aot.SHARED_BYTES.items():
        assert aot.Compiled("kernel", capability, shared=size).problem(case) == ""
        assert f"has {size}" in aot.Compiled("kernel", capability, shared=size + 1).problem(case)
    assert aot.Compiled("kernel", 100, tensor_memory=512).problem(case) == ""
    assert "640 columns of tensor memory" in aot.Compiled("kernel", 100, tensor_memory=640).problem(case)
