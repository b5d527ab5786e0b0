"""Kernels compiled ahead of time, for chips that are not there: `python -m labkit.kernels.aot`.

Triton's compiler needs no GPU. For every kernel and chip this says what a GPU would say only at the first launch:
whether it compiles, whether its shared memory fits (the compiler does not look), and whether registers spill to memory.
Each room lists its cases in `aot_cases()`; a plain run takes the few that matter most, `--all` every block size.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from labkit._table import Table
from labkit.kernels.chips import SHARED_BYTES, TENSOR_MEMORY

ROOMS = ("quantized_linear", "decode_attention", "kv_quantize", "flash_attention")


@dataclass(frozen=True)
class Case:
    """One compilation: a kernel, the types of its arguments, its constants. `spill_bytes` is the most it may spill, and
    `max_registers` what the compiler is told to give a thread at most.

    `signature`: Triton's type by argument, such as "*bf16" or "i32"; constants are left out. Pointers, and the integers
    that `divisible` names, are promised to be multiples of 16, as a launch finds out for itself.
    """

    name: str
    kernel: object
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    divisible: tuple[str, ...] = ()
    spill_bytes: int = 0
    capabilities: tuple[int, ...] = tuple(SHARED_BYTES)
    every_run: bool = True


@dataclass(frozen=True)
class Compiled:
    """What came out for one case and chip. `error` is the compiler's last line, else empty."""

    name: str
    capability: int
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    tensor_memory: int = 0
    error: str = ""

    def problem(self, case: Case) -> str:
        """Why this would not do, or an empty string."""
        if self.error:
            return self.error
        if self.shared > SHARED_BYTES[self.capability]:
            return f"{self.shared} bytes of shared memory; sm_{self.capability} has {SHARED_BYTES[self.capability]}"
        if self.tensor_memory > TENSOR_MEMORY:
            return f"{self.tensor_memory} columns of tensor memory; sm_{self.capability} has {TENSOR_MEMORY}"
        if self.spilled > case.spill_bytes:
            return f"{self.spilled} bytes a thread spill; at most {case.spill_bytes} are allowed"
        return ""


def cases(every: bool = False) -> list[Case]:
    """The cases of all rooms: those of every run, or all."""
    found = [c for room in ROOMS for c in importlib.import_module(f"labkit.kernels.{room}.aot").aot_cases()]
    return [case for case in found if every or case.every_run]


def compile_case(case: Case, capability: int) -> Compiled:
    """Compile to machine code for `sm_<capability>` and read what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in case.divisible]
    source = ASTSource(
        fn=case.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.max_registers}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # whatever the compiler raises is the finding
        last = (str(error).strip().splitlines() or [""])[-1]
        return Compiled(case.name, capability, error=f"{type(error).__name__}: {last}")
    if "trap;" in compiled.asm["ptx"]:
        # Seen where tensor memory does not suffice: it compiles, to a kernel that only stops.
        return Compiled(case.name, capability, error="compiled to a trap")
    registers, spilled = _resources(compiled.asm["cubin"])
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    return Compiled(case.name, capability, compiled.metadata.shared, registers, spilled, tensor_memory)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack and local memory a thread, as `cuobjdump` reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    # A file may hold several functions: the most that one of them takes.
    most = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", text.stdout))) for name in ("REG", "STACK", "LOCAL")}
    return most["REG"], most["STACK"] + most["LOCAL"]


def compile_all(chosen: list[Case], workers: int = 2) -> list[tuple[Case, Compiled]]:
    """Every case for each of its chips; the assemblers run beside each other."""
    pairs = [(case, capability) for case in chosen for capability in case.capabilities]
    with ThreadPoolExecutor(workers) as pool:
        return list(zip((case for case, _ in pairs), pool.map(lambda pair: compile_case(*pair), pairs), strict=True))


def main(arguments: list[str] | None = None) -> int:
    """Compile, print a table, and end with 1 if anything would not do."""
    parser = argparse.ArgumentParser(prog="python -m labkit.kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every block size, not only those of every run")
    results = compile_all(cases(parser.parse_args(arguments).all))
    rows = tuple(
        (case.name, f"sm_{found.capability}", *map(str, (found.shared, found.registers, found.spilled)), problem)
        for case, found, problem in ((case, found, found.problem(case)) for case, found in results)
    )
    print(Table(("kernel", "chip", "shared", "registers", "spilled", "problem"), rows))
    return 1 if any(row[-1] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
