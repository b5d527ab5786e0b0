"""The rungs: what each turns on, which bottleneck it is for, and where it does not go together with another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from labkit import _check


@dataclass(frozen=True)
class Rung:
    """A technique. `does` says what it changes, `attacks` what it makes less of; `chapter` is where it was built."""

    name: str
    title: str
    does: str
    attacks: str
    chapter: int


_RUNGS = (
    Rung("step", "own step", "a decode step written out, from a CUDA graph on a GPU", "launches and Python", 1),
    Rung("bfloat16", "bfloat16", "weights and activations in 16 bits in place of 32", "bytes of weights", 1),
    Rung("int8", "INT8 weights", "matrices at 8 bits, in groups", "bytes of weights", 2),
    Rung("int4", "INT4 weights", "matrices at 4 bits, in groups; takes the place of INT8", "bytes of weights", 2),
    # Where the head is tied to the embedding, the embedding stays as it was, and memory grows by the packed head.
    Rung("int8_head", "INT8 head", "the output matrix at 8 bits as well", "bytes that a step reads", 2),
    Rung("attention", "fused attention", "no matrix of scores in memory", "memory and time of long prompts", 4),
    Rung("quantized_kv", "INT8 KV cache", "keys and values at 8 bits", "bytes of the cache", 3),
    Rung("speculation", "speculation", "several tokens verified in one pass", "passes over the weights", 5),
)
RUNGS: Mapping[str, Rung] = MappingProxyType({rung.name: rung for rung in _RUNGS})


def check_rungs(name: str, rungs: Iterable[str]) -> tuple[str, ...]:
    """The names, each once. Errors: ValueError for an unknown one, with the near ones, and for one that comes twice."""
    takes = f"names of rungs: {', '.join(RUNGS)}"
    _check.require(not isinstance(rungs, str) and isinstance(rungs, Iterable), name, rungs, takes)
    names = tuple(rungs)
    for rung in names:
        _check.choice(name, rung, list(RUNGS))
    _check.require(len(set(names)) == len(names), name, names, "each rung once")
    return names


def effective(rungs: Iterable[str]) -> tuple[str, ...]:
    """Those that change something, in their order: INT4 takes INT8's place."""
    on = tuple(rungs)
    return tuple(rung for rung in on if not (rung == "int8" and "int4" in on))


def refusals(
    rungs: Iterable[str], *, device: torch.device | str, dtype: torch.dtype, has_proposer: bool = True
) -> dict[str, str]:
    """Of `rungs`, in the order in which they are put on: those that do not go on what is on already, with the reason.

    device, dtype: of the model as it was loaded. has_proposer: whether there is something that drafts for it.
    """
    device = _check.device("device", device)
    on: list[str] = []
    refused: dict[str, str] = {}
    for rung in check_rungs("rungs", rungs):
        reason = _reason(rung, on, device, dtype, has_proposer)
        if reason:
            refused[rung] = reason
        else:
            on.append(rung)
    return refused


def _reason(rung: str, on: list[str], device: torch.device, dtype: torch.dtype, has_proposer: bool) -> str:
    """Why `rung` does not go on top of `on`, or nothing."""
    if rung == "bfloat16" and dtype.itemsize <= 2:
        return "the weights have 16 bits already"
    if rung == "int8" and "int4" in on:
        return "the matrices are at 4 bits already"
    graph = device.type == "cuda" and "step" in on
    if rung == "quantized_kv" and graph:
        return "a CUDA graph replays one set of addresses, and a quantized cache moves as its groups fill up"
    if rung == "step" and device.type == "cuda" and "quantized_kv" in on:
        return "a CUDA graph needs a cache that stays in its place, and a quantized one moves as its groups fill up"
    if rung == "speculation" and "step" not in on:
        return "drafts are verified by this package's own step"
    if rung == "speculation" and not has_proposer:
        return "nothing drafts for this model"
    return ""
