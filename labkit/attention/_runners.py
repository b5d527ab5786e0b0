"""How each implementation of attention is called, and why it would not run. `implementations` is the public side."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from labkit import hardware
from labkit.attention import _flex
from labkit.kernels import flash_attention
from labkit.kernels.flash_attention import why_not_triton

_HALVES = (torch.float16, torch.bfloat16)


def repeated(x: Tensor, heads: int) -> Tensor:
    """`(batch, num_key_value_heads, kv_len, head_dim)` to `heads`, each KV head as often as query heads share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _standard(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula as the eager mode of `transformers` has it: each step is an op, with its result in memory."""
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    scores = (q @ k.transpose(2, 3)) * q.shape[3] ** -0.5
    if causal and q.shape[2] > 1:
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores + torch.zeros_like(sees, dtype=q.dtype).masked_fill_(~sees, torch.finfo(q.dtype).min)
    # In float32 at least, as eager does it; in float64 a reference's own.
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def _of_labkit(backend: str) -> Callable:
    return lambda q, k, v, causal: flash_attention(q, k, v, causal=causal, backend=backend)


def _sdpa(backend: SDPBackend) -> Callable:
    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        if backend is SDPBackend.EFFICIENT_ATTENTION:
            k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        q_len, kv_len = q.shape[2], k.shape[2]
        # PyTorch aligns is_causal to the first key; this bias says that the last query stands at the last key.
        aligned = causal_lower_right(q_len, kv_len) if causal and 1 < q_len != kv_len else None
        options = {"enable_gqa": k.shape[1] != q.shape[1], "is_causal": causal and q_len == kv_len}
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, aligned, **options)

    return run


def _package(module: str) -> Callable:
    """`flash_attn_func (batch, seq, heads, head_dim)`, whose causal mask is aligned to the end."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        function = importlib.import_module(module).flash_attn_func
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        # Version 4 gives the row statistics beside the output.
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _sample(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(1, 2, 128, head_dim, device=device, dtype=dtype) for _ in range(3))


def _why_no_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cuda":
        return "needs a CUDA GPU; on a CPU Triton's interpreter only tests it, and its time would mean nothing"
    return why_not_triton(*_sample(device, dtype, head_dim))


@functools.cache
def _why_no_sdpa(backend: SDPBackend, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """By asking it, with 128 tokens. What PyTorch holds against it, it says in warnings."""
    if device.type == "cpu" and backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        return "PyTorch has this kernel for GPUs alone"
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        try:
            _sdpa(backend)(*_sample(device, dtype, head_dim), False)
        except RuntimeError as error:
            why = [str(w.message).split(" (Triggered")[0].strip() for w in said] or [str(error)]
            return "PyTorch does not take it here: " + one_line("; ".join(dict.fromkeys(why)))
    return None


def _why_no_package(what: str | None, device: torch.device, dtype: torch.dtype, head_dim: int, least: int):
    """`what`: why it is not installed, or None. `least`: the compute capability that it begins at."""
    if what is not None:
        return what
    if device.type != "cuda":
        return "installed, but it needs a CUDA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < least:
        return f"installed, but it needs compute capability {least}.0; this GPU has {major}.{minor}"
    if dtype not in _HALVES:
        return f"installed, but it takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    fits = head_dim <= 256 and head_dim % 8 == 0
    return None if fits else f"installed, but it takes heads of a multiple of 8 up to 256, not {head_dim}"


def _why_no_flash_attn(*where: object) -> str | None:
    return _why_no_package(hardware.why_not_installed("flash-attn"), *where, least=8)


def _why_no_flash_attn_4(*where: object) -> str | None:
    return _why_no_package(hardware.why_not_installed("flash-attn-4"), *where, least=9)


def _why_no_flex(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype is torch.float64:
        return "it takes float32, bfloat16 and float16, not float64"
    if device.type == "cuda":
        return hardware.why_not_installed("triton")
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    found = any(name and shutil.which(name) for name in compilers)
    return None if found else "torch.compile needs a C++ compiler on a CPU: install g++"


def one_line(text: str, most: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


@dataclass(frozen=True)
class Runner:
    """`run(q, k, v, causal)`; `why_not(device, dtype, head_dim)` is one line or None; `backend` says what runs;
    `matrices`: how often the matrix of scores is in memory, in float32; `repeats`: K and V are repeated."""

    run: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    why_not: Callable[[torch.device, torch.dtype, int], str | None]
    backend: str
    matrices: int = 0
    repeats: bool = False


def _always(*_: object) -> None:
    return None


def _pytorch(backend: SDPBackend, text: str, **more: object) -> Runner:
    return Runner(
        _sdpa(backend), functools.partial(_why_no_sdpa, backend), f"F.scaled_dot_product_attention: {text}", **more
    )


RUNNERS = {
    "standard": Runner(_standard, _always, "op by op, softmax in float32", matrices=3, repeats=True),
    "labkit triton": Runner(_of_labkit("triton"), _why_no_triton, "flash_attention: triton"),
    "labkit torch": Runner(_of_labkit("torch"), _always, "flash_attention: torch"),
    "labkit tiled": Runner(_of_labkit("tiled"), _always, "flash_attention: tiled"),
    "sdpa math": _pytorch(SDPBackend.MATH, "math", matrices=3, repeats=True),
    "sdpa efficient": _pytorch(SDPBackend.EFFICIENT_ATTENTION, "memory-efficient", repeats=True),
    "sdpa flash": _pytorch(SDPBackend.FLASH_ATTENTION, "flash"),
    "sdpa cudnn": _pytorch(SDPBackend.CUDNN_ATTENTION, "cuDNN"),
    "flash-attn 2": Runner(_package("flash_attn"), _why_no_flash_attn, "flash_attn.flash_attn_func"),
    "flash-attn 4": Runner(_package("flash_attn.cute"), _why_no_flash_attn_4, "flash_attn.cute.flash_attn_func"),
    "FlexAttention": Runner(_flex.run, _why_no_flex, "flex_attention, compiled, with a block mask"),
}


def backend_line(name: str, q: Tensor, k: Tensor, causal: bool) -> str:
    """What runs, with what it costs beside the kernel itself."""
    runner, said = RUNNERS[name], [RUNNERS[name].backend]
    if runner.repeats and q.shape[1] != k.shape[1]:
        said.append(f"K and V repeated {q.shape[1] // k.shape[1]} times")
    if name.startswith("sdpa") and causal and 1 < q.shape[2] != k.shape[2]:
        told = q.is_cuda and name in ("sdpa flash", "sdpa efficient")
        size = f"a mask of {q.shape[2]} x {k.shape[2]}"
        said.append(
            "the kernel is told to align to the end" if told else f"{size}, since is_causal aligns to the start"
        )
    return "; ".join(said)
