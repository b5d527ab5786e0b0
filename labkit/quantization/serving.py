"""What vLLM makes of a checkpoint, from its `config.json` alone: what it refuses, and what it does slowly.

Read in vLLM's source (auto_gptq, auto_awq, compressed_tensors, marlin_utils and the AWQ kernels, in its state of 2026),
not run. Other versions differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from labkit import _check

_GROUPS = (-1, 32, 64, 128)
# Marlin's tile: input features and output features are multiples of these.
_TILE_K, _TILE_N = 128, 64
_KEYS = {
    "gptq": ("bits", "group_size", "desc_act", "sym"),
    "awq": ("bits", "group_size", "zero_point"),
    "compressed-tensors": ("format", "config_groups", "ignore"),
}
# Matrices that vLLM multiplies with as one.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class ServingCheck:
    """`refusals`: why vLLM does not serve it, none where it does. `notes`: what it does slowly, or only in part."""

    refusals: tuple[str, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        lines = [f"refused: {why}" for why in self.refusals] or ["no reason found why vLLM would refuse it"]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def check_vllm(config: Mapping[str, object] | str | Path) -> ServingCheck:
    """What vLLM's source says of a checkpoint. config: what its `config.json` holds, or the checkpoint's folder.

    Errors: ValueError for a config without a `quantization_config`, or with one of another kind.
    """
    if isinstance(config, str | Path):
        config = json.loads((Path(config) / "config.json").read_text(encoding="utf-8"))
    stored = config.get("quantization_config")
    _check.require(isinstance(stored, Mapping), "config", "no quantization_config", "one of a quantized model")
    method = _check.choice("quant_method", stored.get("quant_method"), tuple(_KEYS))
    missing = [key for key in _KEYS[method] if key not in stored]
    if missing:
        return ServingCheck((f"quantization_config lacks {', '.join(missing)}",), ())
    refusals = [*_REFUSALS[method](stored), *_split(stored)]
    if config.get("dtype", config.get("torch_dtype")) not in ("float16", "bfloat16"):
        refusals.append("the config's dtype is neither float16 nor bfloat16, and there is no kernel for another")
    return ServingCheck(tuple(refusals), tuple(_notes(config, stored)))


def _gptq(stored: Mapping[str, object]) -> Iterator[str]:
    if stored["bits"] not in (4, 8):
        yield f"GPTQ of {stored['bits']} bits: it takes 4 or 8"
    if not stored["sym"]:
        yield "asymmetric GPTQ: it takes sym=True only; an asymmetric model goes as compressed-tensors or AWQ of 4 bits"
    yield from _group(stored["group_size"])


def _awq(stored: Mapping[str, object]) -> Iterator[str]:
    if stored["bits"] != 4:
        yield f"AWQ of {stored['bits']} bits: it takes 4"
    yield from _group(stored["group_size"])


def _compressed_tensors(stored: Mapping[str, object]) -> Iterator[str]:
    for group in stored["config_groups"].values():
        weights = group["weights"]
        bits, sym = weights["num_bits"], weights["symmetric"]
        if bits not in (4, 8):
            yield f"{bits} bits: its kernels take 4 or 8"
        elif bits == 8 and not sym:
            yield "asymmetric 8 bits: it loads them, and its Marlin kernel fails at the first token; sym=True works"
        yield from _group(weights["group_size"] or -1)


def _kinds(stored: Mapping[str, object]) -> dict[str, int]:
    """A number for each matrix that the config names, other ones for other kinds; -1 for those that stay in float."""
    groups = stored.get("config_groups", {}).values()
    targets = {target: number for number, group in enumerate(groups) for target in group["targets"]}
    floats = [*stored.get("ignore", ()), *stored.get("dynamic", ()), *(stored.get("modules_to_not_convert") or ())]
    kinds = targets | dict.fromkeys(floats, -1)
    return {name.removeprefix("-:").removeprefix("re:").strip("^$").replace("\\", ""): n for name, n in kinds.items()}


def _split(stored: Mapping[str, object]) -> Iterator[str]:
    """Matrices that are multiplied as one and are not stored alike."""
    kinds = _kinds(stored)
    for name in kinds:
        for fused in _FUSED:
            head, _, last = name.rpartition(".")
            parts = [f"{head}.{part}" for part in fused]
            # A matrix that no name matches belongs to the one kind there is.
            if last in fused and len({kinds.get(part, 0) for part in parts}) > 1:
                yield f"{', '.join(parts)} are not stored alike, and it multiplies with them as one matrix"
                return


def _group(size: int) -> Iterator[str]:
    if size not in _GROUPS:
        yield f"group_size {size}: its Marlin kernels take {', '.join(map(str, _GROUPS))}"


_REFUSALS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}


def _matrices(config: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Input and output features of a Llama-like layer's matrices, as vLLM multiplies with them on one GPU."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    return {
        "qkv_proj": (hidden, (heads + 2 * kv_heads) * head_dim),
        "o_proj": (heads * head_dim, hidden),
        "gate_up_proj": (hidden, 2 * inner),
        "down_proj": (inner, hidden),
    }


def _notes(config: Mapping[str, object], stored: Mapping[str, object]) -> Iterator[str]:
    if {"hidden_size", "intermediate_size", "num_attention_heads"} <= config.keys():
        odd = [f"{name} ({k} to {n})" for name, (k, n) in _matrices(config).items() if k % _TILE_K or n % _TILE_N]
        if odd:
            yield (
                f"Marlin's tiles are {_TILE_K} x {_TILE_N}: {', '.join(odd)} must be padded, which recent versions "
                "do, or go through a slower kernel"
            )
        heads = (config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"])
        if any(count % 2 for count in heads):
            yield f"{heads[0]} heads and {heads[1]} KV heads: two GPUs cannot share them (tensor parallelism)"
    if stored["quant_method"] == "gptq" and stored["desc_act"]:
        yield "act-order: every input's columns are put in order first, which costs time"
    if stored["quant_method"] == "compressed-tensors" and not config.get("tie_word_embeddings", True):
        if not any("lm_head" in name for name in stored["ignore"]):
            yield "a packed head: recent versions take it, older ones look for a float one"
