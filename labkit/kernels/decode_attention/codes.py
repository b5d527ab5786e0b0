"""Codes to floats in registers, for the Triton kernel of this room.

Words of two bytes lie in shared memory as 16-bit elements, which the matrix unit's loads hand out in pairs: one logical
instruction puts a field of two words into the mantissas of two floats.
"""

import triton
import triton.language as tl

from labkit.kernels._backend import interpreted

# The interpreter has no inline assembly.
_PLAIN = tl.constexpr(interpreted())


@triton.constexpr_function
def _offset(half):
    """The power of two whose mantissa codes are put into: one of float16 (`half`) has room for 8 bits of units, one of
    bfloat16 for 7."""
    return 1024 if half else 128


@triton.constexpr_function
def _unpack(shift, bits, half, keep):
    """PTX for the codes at bit `shift` of two words, as two float16 (`half`) or bfloat16: or-ed into the mantissa of
    `_offset`, which is taken off again unless `keep`."""
    mask, magic, less, one = (1 << bits) - 1, *((0x6400, 0xE400, 0x3C00) if half else (0x4300, 0xC300, 0x3F80))
    mask, magic, less, one = (f"0x{x << 16 | x:08x}" for x in (mask, magic, less, one))
    word = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    # 0xea: (t and mask) or magic.
    if keep:
        return f"{{ .reg .b32 t; {word} lop3.b32 $0, t, {mask}, {magic}, 0xea; }}"
    floats = "f16x2" if half else "bf16x2"
    code = f"lop3.b32 c, t, {mask}, {magic}, 0xea; mov.b32 one, {one}; mov.b32 less, {less};"
    return f"{{ .reg .b32 t, c, one, less; {word} {code} fma.rn.{floats} $0, c, one, less; }}"


@triton.jit
def _part(packed, field: tl.constexpr, bits: tl.constexpr, dtype: tl.constexpr, keep: tl.constexpr = False):
    """The codes of one field of bits in `dtype`, exact; larger by `_offset` where they `keep` it. Codes of 8 bits take
    float16."""
    tl.static_assert(bits < 8 or dtype == tl.float16)
    if _PLAIN:
        codes = ((packed >> (field * bits)) & ((1 << bits) - 1)).to(dtype)
        return codes + tl.full((), _offset(dtype == tl.float16), dtype) if keep else codes
    else:
        asm: tl.constexpr = _unpack(field * bits, bits, dtype == tl.float16, keep)
        if dtype == tl.float16:
            return tl.inline_asm_elementwise(asm, "=r,r", [packed], dtype=tl.float16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(asm, "=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def _at_most_128(q):
    """The query in float16, each row times a power of two that brings it to less than 128, and what undoes that. Times
    the scales of keys, no number overflows while their range is less than 2^16."""
    most = tl.max(tl.abs(q[0].to(tl.float32)), axis=1)
    for field in tl.static_range(1, len(q)):
        most = tl.maximum(most, tl.max(tl.abs(q[field].to(tl.float32)), axis=1))
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 7)
    factor = ((260 - exponent) << 23).to(tl.float32, bitcast=True)
    undo = ((exponent - 6) << 23).to(tl.float32, bitcast=True)
    small = ((q[0].to(tl.float32) * factor[:, None]).to(tl.float16),)
    for field in tl.static_range(1, len(q)):
        small = small + ((q[field].to(tl.float32) * factor[:, None]).to(tl.float16),)
    return small, undo
