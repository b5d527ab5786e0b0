"""FlashAttention beside PyTorch's kernels and installed packages: 4k to 16k tokens, heads of 128, bfloat16.

Every output is held against float64 before it is timed, and the gradients are too, on a part of the heads.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

from labkit.cli.gpu_sections import Recorder
from labkit.cli.gpu_sections.flash_attention_inputs import TINY, Shape, inputs, kind
from labkit.kernels.flash_attention.blocks import Blocks

# Of the norm of the output or of a gradient, more than 16-bit dtypes round.
_MOST_OFF = 0.02
# TFLOP/s of the forward pass on Hopper, and forward and backward as a part of PyTorch's flash backend: causal or not.
_FORWARD = {False: 450.0, True: 380.0}
_BOTH = {False: 0.9, True: 0.8}
_FORWARD_RATIO, _BACKWARD = 0.9, 280.0
# Hopper's other candidates for heads of 128, which differ in more than their tiles: two programs a multiprocessor of 8
# warps, whose matrix instructions wait for each other, and one without that.
_FORMS = (
    Blocks(128, 128, 64, 8, 2, described=True, max_registers=128),
    Blocks(128, 128, 64, 8, 3, described=True),
)
# Seconds after which no further variant is begun: what is recorded is better than what is cut off; and after which
# cuDNN is left out, which plans each shape and pass anew for half a second.
_LAST_START_S, _LAST_PLAN_S = 28.0, 21.0
_HOPPER = (9, 0)


def flash_attention(recorder: Recorder) -> None:
    """TFLOP/s by implementation, forward and with gradients; extra memory by length; a few block sizes."""
    begin = time.monotonic()
    import torch

    torch.manual_seed(0)
    shape = TINY if recorder.tiny else Shape()
    for causal in (False, True):
        recorder.record(f"gradients, {kind(causal)}, off by", _check_gradients(recorder, shape, causal))
    forward = {}
    for backward in (False, True):
        for size in shape.sizes:
            for causal in (False, True):
                seconds = _compare(recorder, shape, size, causal, backward, begin)
                if not backward:
                    forward[size, causal] = seconds
                elif seconds and forward[size, causal]:
                    _backward_alone(recorder, shape, size, causal, seconds - forward[size, causal])
    _memory(recorder, shape)
    for causal in (False, True):
        _block_sizes(recorder, shape, causal, begin + _LAST_START_S)
    _shared_heads(recorder, shape, begin + _LAST_START_S)


def _gradients(attend: object, inputs: list, dout: object) -> list:
    import torch

    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


def _check_gradients(recorder: Recorder, shape: Shape, causal: bool) -> dict[str, float]:
    """How far output and gradients of the Triton kernels are from float64, as a part of its norm, with shared heads.
    Errors: RuntimeError for more than rounding."""
    import torch

    from labkit.kernels import flash_attention as attend

    # As many query heads a KV head as later: each number is compiled by itself.
    q, k, v = inputs(recorder, shape, shape.checked, 1, kv_heads=max(1, shape.kv_heads // 4))
    q = q[:, : shape.heads // shape.kv_heads * k.shape[1]]
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
        raise RuntimeError(f"flash_attention, {kind(causal)}: {wrong} off; rounding takes less than {_MOST_OFF}")
    return off


def _compare(
    recorder: Recorder, shape: Shape, size: tuple[int, int], causal: bool, backward: bool, begin: float
) -> float | None:
    """TFLOP/s of all that are here, in turns, and the ratios to PyTorch's flash backend and to its best. Returns the
    seconds of the course's kernel; None where there was no time."""
    from labkit.attention.implementations import measure_attention

    length, batch = size
    label = f"{'forward and backward' if backward else 'forward'}, {length} tokens, {kind(causal)}"
    spent = time.monotonic() - begin
    if spent > _LAST_START_S:
        recorder.record(f"{label}, TFLOP/s", "left out: no time")
        return None
    q, k, v = inputs(recorder, shape, length, batch)
    cudnn = ("sdpa cudnn",) if spent < _LAST_PLAN_S else ()
    names = (shape.ours, "sdpa flash", *cudnn, "flash-attn 2", "flash-attn 4")
    options = {"causal": causal, "backward": backward, "min_run_s": shape.min_run_s}
    measured = {m.name: m for m in measure_attention(names, q, k, v, **options)}
    speed = {name: m.flops_per_second / 1e12 for name, m in measured.items() if m.absent is None}
    recorder.record(f"{label}, TFLOP/s", {name: round(value, 4) for name, value in speed.items()})
    recorder.record(f"{label}, off by", {name: float(f"{measured[name].error:.2g}") for name in speed})
    absent = {name: m.absent for name, m in measured.items() if m.absent is not None}
    absent |= {} if cudnn else {"sdpa cudnn": "left out: no time"}
    recorder.record(f"{label}, absent", absent)
    if shape.ours not in speed or not measured[shape.ours].error < _MOST_OFF:
        raise RuntimeError(f"{label}: {measured[shape.ours]}")
    _ratios(recorder, shape, label, speed, causal, backward)
    return measured[shape.ours].seconds.median


def _ratios(
    recorder: Recorder, shape: Shape, label: str, speed: dict[str, float], causal: bool, backward: bool
) -> None:
    """The ratios to PyTorch, and the targets."""
    ours, theirs = speed[shape.ours], {name: value for name, value in speed.items() if name.startswith("sdpa")}
    if theirs:
        best = max(theirs, key=theirs.get)
        recorder.record(f"{label}, times PyTorch's best", {"ratio": round(ours / theirs[best], 3), "best": best})
    if "sdpa flash" in theirs:
        least = _BOTH[causal] if backward else _FORWARD_RATIO
        recorder.target(f"{label}, times sdpa flash", ours / theirs["sdpa flash"], at_least=least)
    if _on_hopper(recorder) and not backward:
        recorder.target(f"{label}, TFLOP/s", ours, at_least=_FORWARD[causal])


def _on_hopper(recorder: Recorder) -> bool:
    import torch

    return recorder.device == "cuda" and torch.cuda.get_device_capability() == _HOPPER


def _backward_alone(recorder: Recorder, shape: Shape, size: tuple[int, int], causal: bool, seconds: float) -> None:
    """TFLOP/s of the backward pass, from the two times; counted, as is the custom, as 2.5 times the forward pass."""
    from labkit.attention.traffic import AttentionShape, attention_flops

    length, batch = size
    flops = 2.5 * attention_flops(
        AttentionShape(batch, shape.heads, shape.heads, length, length, shape.head_dim, causal)
    )
    speed = flops / seconds / 1e12 if seconds > 0 else 0.0
    recorder.record(f"backward alone, {length} tokens, {kind(causal)}, TFLOP/s", round(speed, 4))
    if _on_hopper(recorder) and not causal:
        recorder.target(f"stretch: backward alone, {length} tokens, TFLOP/s", speed, at_least=_BACKWARD)


def _memory(recorder: Recorder, shape: Shape) -> None:
    """Bytes that the forward pass takes beside its output, and with gradients in all, over four doublings.
    Errors: RuntimeError if they more than double."""
    from labkit.attention.implementations import measure_attention

    for backward in (False, True):
        found = {}
        for length in shape.doublings:
            q, k, v = inputs(recorder, shape, length, 1)
            options = {"causal": True, "backward": backward, "min_run_s": 0.0}
            peak = measure_attention((shape.ours,), q, k, v, **options)[0].peak_bytes
            found[length] = peak if backward else peak - q.nbytes
        name = "peak bytes with gradients" if backward else "extra bytes of the forward pass"
        recorder.record(f"{name}, causal, batch 1, by tokens", found)
        sizes = list(found.values())
        grown = [b / max(a, 1 << 20) for a, b in zip(sizes, sizes[1:], strict=False)]
        if max(grown) > 2.2:
            raise RuntimeError(f"flash_attention: {name} grow faster than the length: {found}")


def _block_sizes(recorder: Recorder, shape: Shape, causal: bool, last_start: float) -> None:
    """Milliseconds of the forward pass by block sizes, beside those that the kernel takes by itself."""
    from labkit.measure import time_op

    length, batch = shape.sizes[len(shape.sizes) // 2]
    q, k, v = inputs(recorder, shape, length, batch)
    found: dict[str, object] = {}
    for name, call in _variants(shape, q, k, v, causal, recorder.device):
        if time.monotonic() > last_start:
            found[name] = "left out: no time"
            continue
        try:
            timing = time_op(call, device=recorder.device, min_run_s=shape.min_run_s, warmup=1)
            found[name] = round(1e3 * timing.median, 4)
        except Exception as error:  # a tile that the chip has no room for
            found[name] = f"{type(error).__name__}: {error}"[:120]
    recorder.record(f"milliseconds by block sizes, {length} tokens, {kind(causal)}", found)


def _variants(
    shape: Shape, q: object, k: object, v: object, causal: bool, device: str
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The kernel as it is, Hopper's other forms, and other tiles, each with its name."""
    import torch

    from labkit.kernels import flash_attention as attend
    from labkit.kernels.flash_attention import launch

    yield "as it is", partial(attend, q, k, v, causal=causal, backend="triton")
    if device == "cuda" and torch.cuda.get_device_capability() == _HOPPER:
        for form in _FORMS:
            options = (causal, shape.head_dim**-0.5, None, None, None)
            name = f"({form.block_q}, {form.block_k}), {form.num_warps} warps, {form.num_stages} stages, "
            limit = f"{form.max_registers} registers" if form.max_registers else "any registers"
            yield name + limit, partial(launch.forward, q, k, v, *options, blocks=form)
    for sizes in shape.blocks:
        yield str(sizes), partial(attend, q, k, v, causal=causal, block_sizes=sizes, backend="triton")


def _shared_heads(recorder: Recorder, shape: Shape, last_start: float) -> None:
    """Query heads that share KV heads, as models have them, forward and with gradients, where time is left."""
    from labkit.attention.implementations import measure_attention

    length, batch = shape.sizes[len(shape.sizes) // 2]
    q, k, v = inputs(recorder, shape, length, batch, kv_heads=shape.kv_heads)
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
