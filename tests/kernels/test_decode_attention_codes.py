"""The inline assembly that turns codes into floats, run instruction by instruction: Triton's interpreter has none."""

import re

import numpy as np
import pytest
import torch

from labkit.kernels.kv_types import pack_codes

codes = pytest.importorskip("labkit.kernels.decode_attention.codes")


def floats(word: np.ndarray, half: bool) -> np.ndarray:
    """The two 16-bit floats of a 32-bit register, in float64 `(n, 2)`."""
    pair = torch.from_numpy(word.astype(np.uint32).view(np.int16).copy())
    return pair.view(torch.float16 if half else torch.bfloat16).double().view(-1, 2).numpy()


def run(ptx: str, word: np.ndarray, half: bool) -> np.ndarray:
    """What lands in $0, as floats, for `word` in $1."""
    registers = {"$1": word.astype(np.uint64)}

    def read(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full(word.shape, int(name, 0), np.uint64)

    result = None
    for line in re.sub(r"^{ \.reg [^;]*;|}$", "", ptx).split(";")[:-1]:
        op, to, *given = re.split(r",? +", line.strip())
        if op == "mov.b32":
            registers[to] = read(given[0])
        elif op == "shr.u32":
            registers[to] = read(given[0]) >> read(given[1])
        elif op == "lop3.b32":
            a, b, c = map(read, given[:3])
            table = int(given[3], 0)
            # Bit 4 x + 2 y + z of the table is the result for the bits x, y and z.
            chosen = [(i, table >> i & 1) for i in range(8)]
            registers[to] = np.zeros_like(a)
            for i, bit in chosen:
                match = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
                registers[to] |= (match[0] & match[1] & match[2] & np.uint64(0xFFFFFFFF)) * np.uint64(bit)
        else:
            assert op == ("fma.rn.f16x2" if half else "fma.rn.bf16x2") and to == "$0"
            a, b, c = (floats(read(name), half) for name in given)
            result = a * b + c
    return floats(registers["$0"], half) if result is None else result


@pytest.mark.parametrize(("bits", "half"), [(8, True), (4, True), (2, True), (4, False), (2, False)])
@pytest.mark.parametrize("keep", [False, True])
def test_every_code_in_every_place_of_two_words(bits: int, half: bool, keep: bool) -> None:
    fields = 16 // bits
    stored = torch.randint(0, 1 << bits, (5000, 2 * fields)).to(torch.uint8)
    stored[: 1 << bits] = torch.arange(1 << bits)[:, None]
    words = np.ascontiguousarray(pack_codes(stored, bits).numpy()).view(np.uint32)[:, 0]
    unpack, offset = codes._unpack, codes._offset
    for field in range(fields):
        got = run(unpack(field * bits, bits, half, keep), words, half)
        expected = stored[:, 2 * field : 2 * field + 2].double().numpy()
        assert np.array_equal(got, expected + (offset(half) if keep else 0)), field
