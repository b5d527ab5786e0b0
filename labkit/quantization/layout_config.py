"""What each layout can hold, refused by name where it cannot, and the `quantization_config` that says what was stored.

Sources: GPTQModel 7.6 and optimum (GPTQ, AWQ), compressed-tensors 0.20.1, and the readers in transformers 5.22.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from labkit import _check
from labkit.kernels.types import PackedWeight
from labkit.quantization.layouts import has_act_order

FORMATS = ("compressed-tensors", "gptq", "awq")
_AWQ_GROUPS = (-1, 16, 32, 64, 128)


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model by full name: packed ones, and the linear layers that stay in float.

    head: the output embedding's name. blocks: what the names of all matrices in decoder layers start with.
    """

    packed: Mapping[str, PackedWeight]
    floats: Sequence[str]
    head: str | None
    blocks: str

    def common(self, name: str, value: Callable[[PackedWeight], object], fmt: str, instead: str) -> object:
        """What `value` gives for every packed matrix. Errors: ValueError where they differ: there is one field."""
        found: dict[object, str] = {}
        for matrix, weight in self.packed.items():
            found.setdefault(value(weight), matrix)
        got = ", ".join(f"{each} in {matrix}" for each, matrix in found.items())
        takes = f"one {name} for all matrices with format={fmt!r}; {instead}"
        _check.require(len(found) == 1, "model", f"{name} {got}", takes)
        return next(iter(found))

    def group_size(self) -> Callable[[PackedWeight], int]:
        """A matrix's group size as configs write it: -1 where every matrix has one group a row."""
        whole = all(weight.group_size == weight.in_features for weight in self.packed.values())
        return lambda weight: -1 if whole else weight.group_size


def _gptq(matrices: Matrices) -> dict[str, object]:
    """`quantization_config`. Symmetric weights are written as v1, which every reader takes; asymmetric ones as v2, as
    GPTQModel takes a v1 only from a library that it knows to have stored the zero points right."""
    instead = "format='compressed-tensors' takes several"
    for name, weight in matrices.packed.items():
        for side, size in (("input", weight.in_features), ("output", weight.out_features)):
            got = f"{name} with {size} {side} features of {weight.bits} bits"
            takes = "sides of which 32-bit words hold a whole number of rows with format='gptq'; "
            _check.require(size * weight.bits % 32 == 0, "model", got, takes + "format='compressed-tensors' takes it")
        takes = "a matrix in a decoder layer with format='gptq', as transformers looks for none elsewhere; "
        takes += "modules_to_not_convert=('lm_head',), or format='compressed-tensors'"
        _check.require(name.startswith(matrices.blocks), "model", f"a packed {name}", takes)
    sym = matrices.common("sym", lambda weight: weight.zeros is None, "gptq", instead)
    config: dict[str, object] = {
        "quant_method": "gptq",
        "bits": matrices.common("bits", lambda weight: weight.bits, "gptq", instead),
        "group_size": matrices.common("group_size", matrices.group_size(), "gptq", instead),
        "desc_act": any(has_act_order(weight) for weight in matrices.packed.values()),
        "sym": sym,
        "lm_head": False,
        "checkpoint_format": "gptq" if sym else "gptq_v2",
        "pack_dtype": "int32",
    }
    left = [name for name in matrices.floats if name.startswith(matrices.blocks)]
    if left:
        # optimum and vLLM read the first, by the ends of names and by parts of them; GPTQModel the second.
        config["modules_in_block_to_quantize"] = [list(matrices.packed)]
        config["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in left}
    return config


def _awq(matrices: Matrices) -> dict[str, object]:
    """`quantization_config`. Zero points always lie in the file, so that symmetric weights are written as asymmetric
    ones whose zero points are all 8."""
    for name, weight in matrices.packed.items():
        instead = "format='gptq' or 'compressed-tensors' takes it"
        _check.require(weight.bits == 4, "model", f"{name} of {weight.bits} bits", f"4 with format='awq'; {instead}")
        got = f"{name} with {weight.out_features} output features"
        takes = "a multiple of 8 with format='awq'; format='compressed-tensors' takes it"
        _check.require(weight.out_features % 8 == 0, "model", got, takes)
        takes = "groups of consecutive columns with format='awq' (desc_act=False); format='gptq' takes act-order"
        _check.require(not has_act_order(weight), "model", f"{name} with act-order", takes)
        takes = "a float head with format='awq', as transformers converts none; modules_to_not_convert=('lm_head',), "
        _check.require(name != matrices.head, "model", f"a packed {name}", takes + "or format='compressed-tensors'")
    instead = "format='compressed-tensors' takes several"
    group = matrices.common("group_size", matrices.group_size(), "awq", instead)
    takes = f"one of {', '.join(map(str, _AWQ_GROUPS))} with format='awq'; format='compressed-tensors' takes it"
    _check.require(group in _AWQ_GROUPS, "model", f"group_size {group}", takes)
    left = [name for name in matrices.floats if name != matrices.head]
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        # None stands for the head alone; a list must name it too.
        "modules_to_not_convert": list(matrices.floats) if left else None,
    }


def _compressed_tensors(matrices: Matrices) -> dict[str, object]:
    """`quantization_config`, with a config group for each kind of matrix; by name where there are several."""
    size = matrices.group_size()
    same = len({weight.group_size for weight in matrices.packed.values()}) == 1
    kinds: dict[tuple[int, bool, int], list[str]] = {}
    for name, weight in matrices.packed.items():
        takes = "groups of consecutive columns (desc_act=False) with format='compressed-tensors', which gave up "
        takes += "act-order by index in version 0.20; format='gptq' takes it"
        _check.require(not has_act_order(weight), "model", f"{name} with act-order", takes)
        group = size(weight)
        group = -1 if group == weight.in_features and not same else group
        kinds.setdefault((weight.bits, weight.zeros is None, group), []).append(name)
    groups = {}
    for number, ((bits, sym, group), names) in enumerate(kinds.items()):
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else [f"re:^{re.escape(name)}$" for name in names],
            "weights": {
                "num_bits": bits,
                "type": "int",
                "symmetric": sym,
                "strategy": "channel" if group == -1 else "group",
                "group_size": None if group == -1 else group,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(matrices.floats),
        "config_groups": groups,
    }


def quantization_config(matrices: Matrices, fmt: str) -> dict[str, object]:
    """What `config.json` says of the packed matrices. Errors: ValueError, naming the matrix, for what the layout cannot
    hold, with what can."""
    return {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq}[fmt](matrices)
