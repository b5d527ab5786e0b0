"""What attention reads in place of full-precision keys or values: codes of a few bits, and a recent part as it was."""

from dataclasses import dataclass

import torch

from labkit import _check
from labkit.kernels._tensor_fields import TensorFields

KV_BITS = (8, 4, 2)
AXES = ("channel", "token")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_grid(shape: tuple[int, ...], bits: int, group_size: int, axis: str) -> tuple[int, ...]:
    """The shape of scales and minimums for keys or values of `shape (n, kv_heads, length, head_dim)`.

    Errors: ValueError for bits, a group or an axis that do not fit it.
    """
    _check.choice("bits", _check.integer("bits", bits), KV_BITS)
    _check.choice("axis", axis, AXES)
    n, heads, length, head_dim = shape
    _check.require(head_dim % (16 // bits) == 0, "head_dim", head_dim, f"a multiple of {16 // bits} at {bits} bits")
    _check.integer("group_size", group_size, 1)
    divided, of = (length, f"length, {length}") if axis == "channel" else (head_dim, f"head_dim, {head_dim}")
    _check.require(divided % group_size == 0, "group_size", group_size, f"a divisor of {of}, for axis {axis!r}")
    groups = divided // group_size
    return (n, heads, groups, head_dim) if axis == "channel" else (n, heads, length, groups)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes `(..., head_dim)` to bytes `(..., head_dim * bits / 8)`. Two bytes are a word, the lower one first:
    word j of W = head_dim * bits / 16 holds channel j in its lowest bits, then j + W, j + 2 W, and so on."""
    parts = codes.unflatten(-1, (16 // bits, -1)).to(torch.int16)
    words = parts[..., 0, :].clone()
    for part in range(1, 16 // bits):
        words |= parts[..., part, :] << (part * bits)
    return words.view(torch.uint8)


def in_words(packed: torch.Tensor) -> bool:
    """Whether each token's codes start at an even byte, so that they can be read as words where they lie."""
    return packed.storage_offset() % 2 == 0 and packed.stride(-1) == 1 and not any(s % 2 for s in packed.stride()[:-1])


def unpack_codes(packed: torch.Tensor, bits: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """The codes again, `(..., head_dim)` in `dtype`, in the order of the channels."""
    packed = packed if in_words(packed) else packed.clone(memory_format=torch.contiguous_format)
    words, mask = packed.view(torch.int16), (1 << bits) - 1
    codes = torch.empty(*words.shape[:-1], 16 // bits, words.shape[-1], dtype=dtype, device=packed.device)
    for shift, part in zip(range(0, 16, bits), codes.unbind(-2), strict=True):
        part.copy_((words >> shift if shift else words) & mask)
    return codes.flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedKV(TensorFields):
    """Keys or values `(n, num_key_value_heads, length, head_dim)` as x = code * scale + minimum, then a recent part.

    `n` is the batch, or with a block table the number of blocks, where `length` is the block size. Axis "channel"
    (keys): `group_size` consecutive tokens of one channel share a scale and a minimum, `(n, kv_heads,
    length / group_size, head_dim)`. Axis "token" (values): `group_size` consecutive channels of one token do,
    `(n, kv_heads, length, head_dim / group_size)` (KIVI, Liu et al., 2024, section 3).
    codes: uint8 `(n, kv_heads, length, head_dim * bits / 8)`, packed as `pack_codes` says. scales, minimums: bfloat16,
    float16 or float32. recent: `(batch, kv_heads, room, head_dim)` in the model's dtype, or None; row b's token
    t >= n_quantized[b] lies at recent[b, :, t - n_quantized[b]]. n_quantized: int32 `(batch,)`, how many tokens of
    each row lie in codes; None: all of them. Errors: ValueError for shapes or dtypes that do not fit together.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    recent: torch.Tensor | None
    n_quantized: torch.Tensor | None
    bits: int
    group_size: int
    axis: str

    def __post_init__(self) -> None:
        _check.tensor("codes", self.codes, ndim=4, dtypes=(torch.uint8,))
        _check.choice("bits", _check.integer("bits", self.bits), KV_BITS)
        grid = check_grid(self.shape, self.bits, self.group_size, self.axis)
        for name, value in (("scales", self.scales), ("minimums", self.minimums)):
            _check.tensor(name, value, ndim=4, dtypes=_FLOATS)
            _check.require(tuple(value.shape) == grid, name, f"shape {tuple(value.shape)}", f"{grid}")
        same = self.scales.dtype is self.minimums.dtype
        _check.require(same, "minimums", self.minimums.dtype, f"the dtype of scales, {self.scales.dtype}")
        both = (self.recent is None) == (self.n_quantized is None)
        got = "one of them without the other"
        _check.require(both, "recent, n_quantized", got, "both, or None and None where all tokens are codes")
        if self.recent is not None:
            self._check_recent(self.recent, self.n_quantized)

    def _check_recent(self, recent: torch.Tensor, n_quantized: torch.Tensor) -> None:
        _check.tensor("recent", recent, ndim=4, dtypes=(*_FLOATS, torch.float64))
        _check.tensor("n_quantized", n_quantized, ndim=1, dtypes=(torch.int32,))
        heads, head_dim = self.codes.shape[1], self.head_dim
        fits = recent.shape[1] == heads and recent.shape[3] == head_dim
        _check.require(fits, "recent", f"shape {tuple(recent.shape)}", f"(batch, {heads}, room, {head_dim})")
        fits = n_quantized.shape[0] == recent.shape[0]
        _check.require(fits, "n_quantized", f"{n_quantized.shape[0]} rows", f"{recent.shape[0]}, as recent has")

    @property
    def head_dim(self) -> int:
        return self.codes.shape[3] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What the codes stand for: `(n, kv_heads, length, head_dim)`."""
        return (*self.codes.shape[:3], self.head_dim)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the codes stand for, `(n, kv_heads, length, head_dim)`, without the recent part; computed in `dtype`."""
        codes = unpack_codes(self.codes, self.bits, dtype)
        dim = 2 if self.axis == "channel" else 3
        grouped = codes.unflatten(dim, (-1, self.group_size))
        scales, minimums = (grid.to(dtype).unsqueeze(dim + 1) for grid in (self.scales, self.minimums))
        return grouped.mul_(scales).add_(minimums).flatten(dim, dim + 1)
