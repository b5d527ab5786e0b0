"""FlashAttention beside PyTorch's kernels and installed packages: 4k to 16k tokens, heads of 128, bfloat16.

Every output is held against float64 before it is timed, and the gradients are too, on a part of the heads.
"""

import time
from dataclasses import dataclass

from labkit.cli.gpu_sections import Recorder

# Of the norm of the output or of a gradient, more than 16-bit dtypes round.
_MOST_OFF = 0.02
# TFLOP/s of the forward pass on Hopper, and forward and backward as a part of PyTorch's flash backend: causal or not.
_FORWARD = {False: 450.0, True: 380.0}
_BOTH = {False: 0.9, True: 0.8}
_BLOCKS = ((128, 64), (64, 64), (64, 128), (128, 128))
# Seconds after which no further variant is begun: what is recorded is better than what is cut off.
_LAST_START_S = 32.0
_HOPPER = (9, 0)


@dataclass(frozen=True)
class _Shape:
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    # Lengths, each with the batch that keeps the chip full.
    sizes: tuple[tuple[int, int], ...] = ((4096, 4), (8192, 2), (16384, 1))
    doublings: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    checked: int = 2048
    min_run_s: float = 0.06
    ours: str = "labkit triton"
    blocks: tuple[tuple[int, int], ...] = _BLOCKS


_TINY = _Shape(2, 1, 32, ((48, 2),), (32, 64), 48, 0.0, "labkit torch", ((16, 16),))


def flash_attention(recorder: Recorder) -> None:
    """TFLOP/s by implementation, forward and with gradients; extra memory by length; a few block sizes."""
    begin = time.monotonic()
    import torch

    torch.manual_seed(0)
    shape = _TINY if recorder.tiny else _Shape()
    for causal in (False, True):
        recorder.record(f"gradients, {_name(causal)}, off by", _check_gradients(recorder, shape, causal))
    for backward in (False, True):
        for length, batch in shape.sizes:
            for causal in (False, True):
                _compare(recorder, shape, length, batch, causal, backward)
    _memory(recorder, shape)
    for causal in (False, True):
        _block_sizes(recorder, shape, causal, begin + _LAST_START_S)
    _shared_heads(recorder, shape, begin + _LAST_START_S)


def _name(causal: bool) -> str:
    return "causal" if causal else "not causal"


def _inputs(recorder: Recorder, shape: _Shape, length: int, batch: int, kv_heads: int | None = None) -> list:
    """q, k and v; by themselves heads are not shared, as these kernels are usually compared."""
    import torch

    # Triton's interpreter multiplies float16 alone rightly.
    options = {"dtype": torch.float16 if recorder.tiny else torch.bfloat16, "device": recorder.device}
    heads = (shape.heads, kv_heads or shape.heads, kv_heads or shape.heads)
    return [torch.randn(batch, n, length, shape.head_dim, **options) for n in heads]


def _gradients(attend: object, inputs: list, dout: object) -> list:
    import torch

    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def _check_gradients(recorder: Recorder, shape: _Shape, causal: bool) -> dict[str, float]:
    """How far output and gradients of the Triton kernels are from float64, as a part of its norm, with shared heads.
    Errors: RuntimeError for more than rounding."""
    import torch

    from labkit.kernels import flash_attention as attend

    q, k, v = _inputs(recorder, shape, shape.checked, 1, kv_heads=max(1, shape.kv_heads // 2))
    q = q[:, : 2 * k.shape[1]]
    dout = torch.randn_like(q)
    found = _gradients(lambda *x: attend(*x, causal=causal, backend="triton"), [q, k, v], dout)
    wide = [x.double() for x in (q, k, v)]
    exact = _gradients(lambda *x: attend(*x, causal=causal, backend="reference"), wide, dout)
    off = {
        name: float(f"{((a.double() - b).norm() / b.norm()).item():.2g}")
        for name, a, b in zip(("out", "dq", "dk", "dv"), found, exact, strict=True)
    }
    wrong = {name: error for name, error in off.items() if not error < _MOST_OFF}
    if wrong:
        raise RuntimeError(f"flash_attention, {_name(causal)}: {wrong} off; rounding takes less than {_MOST_OFF}")
    return off


def _compare(recorder: Recorder, shape: _Shape, length: int, batch: int, causal: bool, backward: bool) -> None:
    """TFLOP/s of all that are here, in turns, and the ratios to PyTorch's flash backend and to its best."""
    from labkit.attention.implementations import measure_attention

    label = f"{'forward and backward' if backward else 'forward'}, {length} tokens, {_name(causal)}"
    q, k, v = _inputs(recorder, shape, length, batch)
    names = (shape.ours, "sdpa flash", "sdpa cudnn", "flash-attn 2", "flash-attn 4")
    options = {"causal": causal, "backward": backward, "min_run_s": shape.min_run_s}
    measured = {m.name: m for m in measure_attention(names, q, k, v, **options)}
    speed = {name: m.flops_per_second / 1e12 for name, m in measured.items() if m.absent is None}
    recorder.record(f"{label}, TFLOP/s", {name: round(value, 4) for name, value in speed.items()})
    recorder.record(f"{label}, off by", {name: float(f"{measured[name].error:.2g}") for name in speed})
    if not backward:
        recorder.record(f"{label}, absent", {name: m.absent for name, m in measured.items() if m.absent is not None})
    if shape.ours not in speed or not measured[shape.ours].error < _MOST_OFF:
        raise RuntimeError(f"{label}: {measured[shape.ours]}")
    _ratios(recorder, shape, label, speed, causal, backward)


def _ratios(
    recorder: Recorder, shape: _Shape, label: str, speed: dict[str, float], causal: bool, backward: bool
) -> None:
    """The ratios to PyTorch, and the targets that the issue of the chapter set."""
    import torch

    ours, theirs = speed[shape.ours], {name: value for name, value in speed.items() if name.startswith("sdpa")}
    if theirs:
        best = max(theirs, key=theirs.get)
        recorder.record(f"{label}, times PyTorch's best", {"ratio": round(ours / theirs[best], 3), "best": best})
    if backward and "sdpa flash" in theirs:
        recorder.target(f"{label}, times sdpa flash", ours / theirs["sdpa flash"], at_least=_BOTH[causal])
    hopper = recorder.device == "cuda" and torch.cuda.get_device_capability() == _HOPPER
    if hopper and not backward:
        recorder.target(f"{label}, TFLOP/s", ours, at_least=_FORWARD[causal])


def _memory(recorder: Recorder, shape: _Shape) -> None:
    """Bytes that the forward pass takes beside its output, and with gradients in all, over four doublings.
    Errors: RuntimeError if they more than double."""
    from labkit.attention.implementations import measure_attention

    for backward in (False, True):
        found = {}
        for length in shape.doublings:
            q, k, v = _inputs(recorder, shape, length, 1)
            options = {"causal": True, "backward": backward, "min_run_s": 0.0}
            peak = measure_attention((shape.ours,), q, k, v, **options)[0].peak_bytes
            found[length] = peak if backward else peak - q.nbytes
        name = "peak bytes with gradients" if backward else "extra bytes of the forward pass"
        recorder.record(f"{name}, causal, batch 1, by tokens", found)
        sizes = list(found.values())
        grown = [b / max(a, 1 << 20) for a, b in zip(sizes, sizes[1:], strict=False)]
        if max(grown) > 2.2:
            raise RuntimeError(f"flash_attention: {name} grow faster than the length: {found}")


def _block_sizes(recorder: Recorder, shape: _Shape, causal: bool, last_start: float) -> None:
    """Milliseconds of the forward pass by block sizes, beside those that the kernel takes by itself."""
    from labkit.kernels import flash_attention as attend
    from labkit.measure import time_op

    length, batch = shape.sizes[len(shape.sizes) // 2]
    q, k, v = _inputs(recorder, shape, length, batch)
    found: dict[str, object] = {}
    for blocks in (None, *shape.blocks):
        if time.monotonic() > last_start:
            found[str(blocks)] = "left out: no time"
            continue
        try:
            call = lambda blocks=blocks: attend(q, k, v, causal=causal, block_sizes=blocks, backend="triton")  # noqa: E731
            timing = time_op(call, device=recorder.device, min_run_s=shape.min_run_s, warmup=1)
            found[str(blocks)] = round(1e3 * timing.median, 4)
        except Exception as error:  # a tile that the chip has no room for
            found[str(blocks)] = f"{type(error).__name__}: {error}"[:120]
    recorder.record(f"milliseconds by block sizes, {length} tokens, {_name(causal)}", found)


def _shared_heads(recorder: Recorder, shape: _Shape, last_start: float) -> None:
    """Query heads that share KV heads, as models have them, forward and with gradients, where time is left."""
    from labkit.attention.implementations import measure_attention

    length, batch = shape.sizes[len(shape.sizes) // 2]
    q, k, v = _inputs(recorder, shape, length, batch, kv_heads=shape.kv_heads)
    for backward in (False, True):
        passes = "forward and backward" if backward else "forward"
        label = f"{shape.heads} heads on {shape.kv_heads}, {length} tokens, causal, {passes}"
        if time.monotonic() > last_start:
            recorder.record(f"{label}, TFLOP/s", "left out: no time")
            continue
        options = {"causal": True, "backward": backward, "min_run_s": shape.min_run_s}
        measured = measure_attention((shape.ours, "sdpa flash"), q, k, v, **options)
        recorder.record(
            f"{label}, TFLOP/s",
            {m.name: round(m.flops_per_second / 1e12, 4) if m.absent is None else m.absent for m in measured},
        )
