"""Packed weights as other software stores them: GPTQ, AWQ and compressed-tensors, to their tensors and back.

K input features, N output features, G groups; words are int32, a word's lowest bits hold its first value.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from labkit import _check
from labkit.kernels.bits import pack_bits, unpack_bits
from labkit.kernels.types import PackedWeight

# Word c of an AWQ row holds columns 8c to 8c + 7 in this order, as its first kernel unpacks two at a time.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Scales may be rounded on their way into another dtype, as long as no weight moves further than this part of the median
# step between two codes of its matrix; that it lay between two codes moved it by up to half a step before.
_MOST_MOVED = 1 / 64


def stored_scales(name: str, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The scales `(N, G)` in `dtype`; below 2^-17 a bfloat16 has no exact float16.

    Errors: ValueError where a weight would move by more than 1/64 of the matrix's median step, or be infinite.
    """
    exact = weight.scales.float()
    stored = weight.scales.to(dtype)
    moved = (stored.float() - exact).abs().max() * ((1 << weight.bits) - 1)
    worst = exact.flatten()[(stored.float() - exact).abs().argmax()]
    takes = f"scales that {str(dtype).removeprefix('torch.')} holds; format='compressed-tensors' from a bfloat16 model "
    takes += "holds every bfloat16"
    got = f"a scale of {worst:.3g} in {name}"
    _check.require(bool(moved <= _MOST_MOVED * exact.abs().median()), "model", got, takes)
    return stored


def group_index(weight: PackedWeight) -> torch.Tensor:
    """The group of each column, int32 `(K,)`."""
    if weight.g_idx is not None:
        return weight.g_idx
    return torch.arange(weight.in_features, dtype=torch.int32, device=weight.device) // weight.group_size


def has_act_order(weight: PackedWeight) -> bool:
    """Whether groups are other than consecutive columns."""
    in_order = torch.arange(weight.in_features, device=weight.device) // weight.group_size
    return weight.g_idx is not None and not torch.equal(weight.g_idx.long(), in_order)


def _zeros(weight: PackedWeight) -> torch.Tensor:
    """Zero points `(N, G)`, uint8, also where they are the middle code and none is stored."""
    if weight.zeros is not None:
        return weight.zeros
    return torch.full(weight.scales.shape, 1 << (weight.bits - 1), dtype=torch.uint8, device=weight.device)


def to_gptq(weight: PackedWeight, scales: torch.Tensor, *, v1: bool) -> dict[str, torch.Tensor]:
    """`qweight (K bits / 32, N)`, `qzeros (G, N bits / 32)`, `scales (G, N)` and `g_idx (K,)`.

    v1: zero points are stored less 1, as AutoGPTQ did; that has no place for a zero point of 0.
    """
    zeros = _zeros(weight)
    _check.require(not v1 or bool((zeros > 0).all()), "v1", v1, "False for a weight with a zero point of 0")
    return {
        "qweight": weight.qweight.T.contiguous(),
        "qzeros": pack_bits(zeros.T - int(v1), weight.bits),
        "scales": scales.T.contiguous(),
        "g_idx": group_index(weight).clone(),
    }


def from_gptq(tensors: Mapping[str, torch.Tensor], bits: int, *, sym: bool, v1: bool) -> PackedWeight:
    """What `to_gptq` wrote, with a `g_idx` only where groups are not consecutive columns."""
    scales, g_idx = tensors["scales"].T.contiguous(), tensors["g_idx"]
    out_features, groups = scales.shape
    zeros = None if sym else unpack_bits(tensors["qzeros"], bits, out_features).T.contiguous() + int(v1)
    qweight, length = tensors["qweight"].T.contiguous(), len(g_idx)
    weight = PackedWeight(qweight, scales, zeros, g_idx, bits, length // groups, length)
    return weight if has_act_order(weight) else replace(weight, g_idx=None)


def _awq_words(rows: torch.Tensor) -> torch.Tensor:
    """`rows (N, n)`, values of 4 bits, to words `(n, N / 8)` of 8 rows each."""
    words = torch.zeros(len(rows) // 8, rows.shape[1], dtype=torch.int32, device=rows.device)
    for i, place in enumerate(AWQ_ORDER):
        words |= rows[place::8].int() << (4 * i)
    return words.T.contiguous()


def to_awq(weight: PackedWeight, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """AWQ's "gemm", of 4 bits: `qweight (K, N / 8)`, `qzeros (G, N / 8)` and `scales (G, N)`, words along the outputs.

    Errors: ValueError for other widths, and for outputs that are no multiple of 8.
    """
    fits = weight.bits == 4 and weight.out_features % 8 == 0
    got = f"{weight.out_features} output features of {weight.bits} bits"
    _check.require(fits, "weight", got, "a multiple of 8 output features, of 4 bits")
    # Transposing the words and not the codes saves most of the time.
    return {
        "qweight": _awq_words(weight.codes()),
        "qzeros": _awq_words(_zeros(weight)),
        "scales": scales.T.contiguous(),
    }


def from_awq(tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    """What `to_awq` wrote, 4 bits; zero points are explicit in this layout, so that it is never symmetric."""
    scales = tensors["scales"].T.contiguous()
    out_features, groups = scales.shape
    place = [AWQ_ORDER.index(column) for column in range(8)]

    def columns(words: torch.Tensor) -> torch.Tensor:
        return unpack_bits(words, 4, out_features).unflatten(-1, (-1, 8))[..., place].flatten(-2).T.contiguous()

    codes = columns(tensors["qweight"])
    length = codes.shape[1]
    zeros = columns(tensors["qzeros"])
    return PackedWeight(pack_bits(codes, 4), scales, zeros, None, 4, length // groups, length)


def to_compressed_tensors(weight: PackedWeight, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """ "pack-quantized": `weight_packed (N, ceil(K bits / 32))`, `weight_scale (N, G)`, `weight_shape (2,)`, and where
    the weight has zero points `weight_zero_point (ceil(N bits / 32), G)`, packed along the output features.

    Its integers are signed and stored with 2^(bits - 1) added, which makes them the codes that a PackedWeight has.
    """
    tensors = {
        "weight_packed": weight.qweight,
        "weight_scale": scales,
        "weight_shape": torch.tensor([weight.out_features, weight.in_features]),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = pack_bits(weight.zeros.T, weight.bits).T.contiguous()
    return tensors


def from_compressed_tensors(tensors: Mapping[str, torch.Tensor], bits: int) -> PackedWeight:
    """What `to_compressed_tensors` wrote."""
    out_features, length = tensors["weight_shape"].tolist()
    scales, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = unpack_bits(zeros.T, bits, out_features).T.contiguous()
    return PackedWeight(tensors["weight_packed"], scales, zeros, None, bits, length // scales.shape[1], length)
