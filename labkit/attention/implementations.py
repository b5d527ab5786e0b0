"""The implementations of attention side by side: which run here, what each gives, takes and needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from labkit import _check
from labkit._table import Table, readable
from labkit.attention._runners import RUNNERS, backend_line, one_line
from labkit.attention.traffic import AttentionShape, attention_flops
from labkit.hardware import describe
from labkit.kernels import BackendUnavailable
from labkit.measure import Timing, compare_ops, peak_memory, synchronize

NAMES = tuple(RUNNERS)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# Queries whose outputs are held against float64: enough to see a wrong tile, and cheap at any length.
_ROWS = 48
# A backward pass has five products where the forward pass has two (Dao 2023, arXiv:2307.08691, section 4.1).
_BACKWARD = 3.5


def attention_implementations(
    device: torch.device | str | None, dtype: torch.dtype | str, head_dim: int
) -> dict[str, str | None]:
    """Each implementation by name: None where it runs here, else one line: why not, and how to get it.

    "standard" is the formula with the matrix of scores in memory, as `transformers`' eager mode; "labkit …" this
    course's, by backend; "sdpa …" PyTorch's, by backend; "flash-attn 2" and "flash-attn 4" the packages; and
    "FlexAttention" PyTorch's compiled one.
    """
    device, dtype = _check.device("device", device), _check.dtype("dtype", dtype)
    _check.integer("head_dim", head_dim, 1)
    return {name: _why_not(name, device, dtype, head_dim) for name in NAMES}


def _why_not(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    return RUNNERS[name].why_not(device, dtype, head_dim)


def _checked(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> AttentionShape:
    _check.tensor("q", q, ndim=4, dtypes=_DTYPES)
    for name, x in (("k", k), ("v", v)):
        _check.tensor(name, x, ndim=4, dtypes=(q.dtype,))
        _check.require(x.device == q.device, name, f"on {x.device}", f"{q.device}, where q is")
        fits = (x.shape[0], x.shape[3]) == (q.shape[0], q.shape[3]) and x.shape == k.shape
        takes = f"({q.shape[0]}, num_key_value_heads, kv_len, {q.shape[3]}), the same for k and v"
        _check.require(fits, name, f"shape {tuple(x.shape)}", takes)
    shape = AttentionShape(*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal)
    unseen = causal and shape.q_len > shape.kv_len
    _check.require(not unseen, "q", f"{shape.q_len} queries", f"at most k's {shape.kv_len}, where causal")
    return shape


def run_attention(name: str, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention of `q (batch, num_attention_heads, q_len, head_dim)` to `k`, `v (batch, num_key_value_heads, kv_len,
    head_dim)` by the implementation of this name; `(batch, num_attention_heads, q_len, head_dim)`.

    With `causal` the last query stands at the last key, in all of them. Errors: ValueError for arguments;
    BackendUnavailable, with its line, for one that does not run here.
    """
    _check.choice("name", name, NAMES)
    _checked(q, k, v, causal)
    reason = _why_not(name, q.device, q.dtype, q.shape[3])
    if reason is not None:
        raise BackendUnavailable(f"{name}: {reason}")
    return RUNNERS[name].run(q, k, v, causal)


@dataclass(frozen=True)
class AttentionMeasurement:
    """One implementation on one shape. `seconds` of a call, `peak_bytes` beside its inputs (output and, with a
    backward pass, gradients included), `flops_per_second` by the pairs that are seen, `error` of the output against
    float64, as a part of its norm, and `backend`, what ran; or `absent`, one line that says why there is nothing."""

    name: str
    seconds: Timing | None = None
    peak_bytes: int | None = None
    backend: str | None = None
    error: float | None = None
    flops_per_second: float | None = None
    absent: str | None = None


def measure_attention(
    names: Iterable[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    backward: bool = False,
    min_run_s: float = 0.2,
) -> tuple[AttentionMeasurement, ...]:
    """Run the implementations of these names in turns, each checked first; arguments as `run_attention` takes them.

    With `backward` a call is the forward pass and the gradients of q, k and v. What does not run here, would not fit
    into memory or fails is a line in its own measurement and stops no other.
    """
    names = tuple(_check.choice("names", name, NAMES) for name in names)
    shape = _checked(q, k, v, causal)
    inputs = tuple(x.detach().requires_grad_(backward) for x in (q, k, v))
    found = {name: _try(name, inputs, shape, backward) for name in names}
    calls = {name: _Guarded(_call(name, inputs, causal, backward)) for name in names if found[name].absent is None}
    timings = compare_ops(calls, device=q.device, min_run_s=min_run_s, warmup=1) if calls else {}
    flops = attention_flops(shape) * (_BACKWARD if backward else 1)
    for name, timing in timings.items():
        if calls[name].failed:
            found[name] = AttentionMeasurement(name, absent=calls[name].failed)
        else:
            found[name] = replace(found[name], seconds=timing, flops_per_second=flops / timing.median)
    return tuple(found[name] for name in names)


def _call(name: str, inputs: tuple[Tensor, ...], causal: bool, backward: bool) -> Callable[[], object]:
    run = functools.partial(RUNNERS[name].run, *inputs, causal)
    if not backward:
        return torch.no_grad()(run)
    gradient = torch.ones_like(inputs[0])
    return torch.enable_grad()(lambda: torch.autograd.grad(run(), inputs, gradient))


class _Guarded:
    """A call that keeps its own error, so that the measurement of the others goes on."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.failed = call, None

    def __call__(self) -> None:
        if self.failed is None:
            try:
                self.call()
            except Exception as error:
                self.failed = _line(error)


def _line(error: Exception) -> str:
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError | MemoryError) else type(error).__name__
    return one_line(f"{kind}: {error}")


def _try(name: str, inputs: tuple[Tensor, ...], shape: AttentionShape, backward: bool) -> AttentionMeasurement:
    """Run it once: what came out, how far off it is and what it took."""
    q, k, v = inputs
    reason = _why_not(name, q.device, q.dtype, shape.head_dim) or _too_large(name, q, shape, backward)
    if reason is not None:
        return AttentionMeasurement(name, absent=reason)
    try:
        with torch.no_grad():
            error = _error(RUNNERS[name].run(q, k, v, shape.causal), q, k, v, shape.causal)
        call = _call(name, inputs, shape.causal, backward)
        call()  # what is compiled or kept at the first call is none of a call's memory
        synchronize(q.device)
        peak = peak_memory(call, device=q.device)
    except Exception as failure:
        if q.is_cuda:
            torch.cuda.empty_cache()
        return AttentionMeasurement(name, absent=_line(failure))
    line = backend_line(name, q, k, shape.causal)
    return AttentionMeasurement(name, peak_bytes=peak, backend=line, error=error)


def _too_large(name: str, q: Tensor, shape: AttentionShape, backward: bool) -> str | None:
    """Why an implementation with the matrix in memory would not fit, told before it is tried."""
    needed = RUNNERS[name].matrices * shape.matrix_elements * max(4, q.element_size()) * (2 if backward else 1)
    free = describe(q.device).free_bytes
    if needed <= 0.9 * free:
        return None
    fits = int(shape.q_len * (0.9 * free / needed) ** 0.5)
    sizes = f"{readable(needed, 'bytes')} for its matrices, and {readable(free, 'bytes')} are free"
    return f"it would take {sizes}; {fits} tokens would fit"


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """How far some rows of `out` are from float64, as a part of their norm."""
    q_len, kv_len = q.shape[2], k.shape[2]
    rows = torch.linspace(0, q_len - 1, min(_ROWS, q_len), device=q.device).long()
    hidden = torch.arange(kv_len, device=q.device) > rows[:, None] + (kv_len - q_len)
    off = norm = 0.0
    for row in range(q.shape[0]):  # a row of the batch at a time, for its copies in float64
        keys, values = (x[row].double()[:, None] for x in (k, v))
        queries = q[row][:, rows].double().unflatten(0, (k.shape[1], -1))
        scores = queries @ keys.transpose(-1, -2) * q.shape[3] ** -0.5
        exact = (scores.masked_fill(hidden, -torch.inf) if causal else scores).softmax(-1) @ values
        off += (out[row][:, rows].double() - exact.flatten(0, 1)).square().sum().item()
        norm += exact.square().sum().item()
    return (off / norm) ** 0.5 if norm else off**0.5


def attention_table(measurements: Iterable[AttentionMeasurement]) -> Table:
    """The measurements as text; those that did not run at the end, with their line."""
    measurements = tuple(measurements)
    ran = [m for m in measurements if m.absent is None]
    rows = [
        (
            m.name,
            readable(m.seconds.median, "s"),
            f"{readable(m.seconds.p10, 's')} to {readable(m.seconds.p90, 's')}",
            readable(m.flops_per_second, "FLOP/s"),
            readable(m.peak_bytes, "bytes"),
            f"{m.error:.1e}",
            m.backend,
        )
        for m in ran
    ]
    rows += [(m.name, "", "", "", "", "", m.absent) for m in measurements if m.absent is not None]
    columns = ("implementation", "median", "p10 to p90", "FLOP/s", "peak memory", "error", "what ran, or why not")
    return Table(columns, tuple(rows))
