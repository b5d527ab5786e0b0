"""`x @ weight.T + bias` for the few rows of a decode step, at the speed of memory where the library's own is not.

A decode step multiplies each weight by one row (or a few, when speculation verifies a draft). PyTorch hands one row to
the BLAS library's GEMV, which on some processors runs on one core and far below the memory's bandwidth. The same
product, written as a batch of two or more row blocks of the weight, goes to the library's batched GEMM, which does not.
Which is faster is measured, once, on the machine at hand.
"""

import functools

import torch
import torch.nn.functional as F

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice
from labkit.kernels.dense_linear.reference import dense_linear_reference
from labkit.measure import compare_ops

BACKENDS = ("torch", "batched", "reference")

# Beyond this many rows the batched form is no faster than the plain one on any processor seen so far.
MAX_BATCHED_ROWS = 4
# The batched form must win by this much to be chosen: within noise, the plain call stays.
_WORTHWHILE = 1.15


@functools.cache
def _row_blocks(out_features: int, threads: int) -> int:
    """How many blocks to cut the weight into: one a thread and at least two, and a divisor."""
    return next((n for n in range(max(2, threads), 1, -1) if out_features % n == 0), 1)


def _batched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out_features, in_features = weight.shape
    rows = x.numel() // in_features
    blocks = _row_blocks(out_features, torch.get_num_threads())
    # The columns are a transposed view on purpose: with these strides bmm reaches the library's batched GEMM, and with
    # others PyTorch's own loop, six times slower.
    columns = x.contiguous().as_strided((blocks, in_features, rows), (0, 1, in_features))
    product = torch.bmm(weight.view(blocks, out_features // blocks, in_features), columns)
    if rows > 1:
        product = product.view(out_features, rows).t()
    product = product.reshape(*x.shape[:-1], out_features)
    return product if bias is None else product + bias


@functools.cache
def _batched_speedup(rows: int, threads: int) -> float:
    """How many times faster the batched form is here, over 85 MB of weights; a tenth of a second."""
    weights = [torch.randn(1536, 576) for _ in range(24)]
    x = torch.randn(rows, 576)
    ops = {
        "torch": lambda: [F.linear(x, weight) for weight in weights],
        "batched": lambda: [_batched(x, weight, None) for weight in weights],
    }
    timings = compare_ops(ops, device="cpu", min_run_s=0.02, warmup=1)
    return timings["torch"].median / timings["batched"].median


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype is b.dtype and a.device == b.device


def _check_tensors(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse what cannot be multiplied; the sentences are made only then, since a step comes here 211 times."""
    both = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    fits = both and weight.ndim == 2 and x.ndim > 0 and x.shape[-1] == weight.shape[1] and _alike(x, weight)
    # The batched form would spread a bias of another shape over the product, in silence.
    adds = isinstance(bias, torch.Tensor) and fits and bias.shape == weight.shape[:1] and _alike(bias, weight)
    if fits and (bias is None or adds):
        return
    _check.tensor("x", x)
    _check.tensor("weight", weight)
    got = f"{tuple(weight.shape)} in {weight.dtype} on {weight.device}"
    takes = f"(out_features, in_features) for x (..., in_features), here {tuple(x.shape)} in {x.dtype} on {x.device}"
    _check.require(fits, "weight", got, takes)
    _check.tensor("bias", bias)
    got = f"{tuple(bias.shape)} in {bias.dtype} on {bias.device}"
    _check.require(False, "bias", got, f"({weight.shape[0]},) in {weight.dtype} on {weight.device}")


def _why_not_batched(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    """The reason why the batched form cannot run, or None."""
    if x.device.type != "cpu":
        return f"it is for the CPU; the tensors are on {x.device}"
    if weight.dtype != torch.float32:
        return f"it is for float32; the weight is {str(weight.dtype).removeprefix('torch.')}"
    if not weight.is_contiguous() or _row_blocks(weight.shape[0], torch.get_num_threads()) == 1:
        return f"the weight {tuple(weight.shape)} cannot be cut into equal blocks of contiguous rows"
    return None if x.numel() else "the input is empty"


def choose(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Choice:
    """As `choose_backend("dense_linear", x, weight)`."""
    _check_tensors(x, weight, bias)
    reason = _why_not_batched(x, weight)
    if reason is not None:
        return Choice("torch", f"the batched form cannot run: {reason}")
    rows = x.numel() // x.shape[-1]
    if rows > MAX_BATCHED_ROWS:
        return Choice("torch", f"{rows} rows are more than the {MAX_BATCHED_ROWS} that the batched form is for")
    speedup = _batched_speedup(rows, torch.get_num_threads())
    name = "batched" if speedup >= _WORTHWHILE else "torch"
    return Choice(
        name, f"with x of {rows} x {x.shape[-1]} the batched form ran {speedup:.2f} times as fast as the plain one here"
    )


def _prefers_batched(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """`choose` without its sentences, which on a small layer would take as long as the product itself."""
    if weight.dtype is not torch.float32 or weight.is_cuda:
        return False
    rows, threads = x.numel() // max(1, weight.shape[1]), torch.get_num_threads()
    if not 0 < rows <= MAX_BATCHED_ROWS or _row_blocks(weight.shape[0], threads) == 1 or not weight.is_contiguous():
        return False
    return _batched_speedup(rows, threads) >= _WORTHWHILE


def dense_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str = "auto"
) -> torch.Tensor:
    """`x (..., in_features)`, `weight (out_features, in_features)`, `bias (out_features)` to `(..., out_features)`.

    Errors: ValueError for shapes that do not fit; BackendUnavailable where a backend asked for by name cannot run.
    """
    _check_tensors(x, weight, bias)
    if backend == "auto":
        return _batched(x, weight, bias) if _prefers_batched(x, weight) else F.linear(x, weight, bias)
    if backend == "torch":
        return F.linear(x, weight, bias)
    if backend == "batched":
        reason = _why_not_batched(x, weight)
        if reason is not None:
            raise BackendUnavailable(f"dense_linear: backend 'batched' cannot run: {reason}")
        return _batched(x, weight, bias)
    _check.choice("backend", backend, ("auto", *BACKENDS))
    return dense_linear_reference(x, weight, bias)
