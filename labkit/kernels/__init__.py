"""Kernels: one room an op, each with a reference that defines it and backends that run it.

An op takes `backend="auto"` or a name. `choose_backend` says which one `auto` would take on these tensors, and why; a
backend asked for by name never falls back in silence, it raises `BackendUnavailable`.
"""

import importlib
import inspect

import torch

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice, interpret_without_gpu, why_no_triton
from labkit.kernels.decode_attention import decode_attention
from labkit.kernels.dense_linear import dense_linear
from labkit.kernels.flash_attention import flash_attention
from labkit.kernels.kv_quantize import kv_quantize
from labkit.kernels.quantized_linear import quantized_linear
from labkit.kernels.types import PackedWeight, QuantizedKV

OPS = ("decode_attention", "dense_linear", "flash_attention", "kv_quantize", "quantized_linear")

__all__ = [
    "OPS",
    "BackendUnavailable",
    "Choice",
    "PackedWeight",
    "QuantizedKV",
    "choose_backend",
    "decode_attention",
    "dense_linear",
    "flash_attention",
    "interpret_without_gpu",
    "kv_quantize",
    "quantized_linear",
    "why_no_triton",
]


def choose_backend(op: str, *tensors: torch.Tensor) -> Choice:
    """The backend that `op(*tensors, backend="auto")` would run, and the reason."""
    _check.choice("op", op, OPS)
    choose = importlib.import_module(f"labkit.kernels.{op}").choose
    names = tuple(inspect.signature(choose).parameters)
    required = sum(p.default is p.empty for p in inspect.signature(choose).parameters.values())
    takes = f"{required} to {len(names)} for {op}: {', '.join(names)}"
    _check.require(required <= len(tensors) <= len(names), "tensors", f"{len(tensors)} tensors", takes)
    return choose(*tensors)
