"""W4A16 and W8A16 beside bfloat16, by rows: error, time from a CUDA graph, and the rows from which dequantizing pays.

Each graph goes through as many copies of the weight as are larger than four times the L2 cache, since in a decode step
every matrix comes from memory.
"""

from collections.abc import Callable

from labkit.cli.gpu_sections import Recorder

_SHAPES, _GROUP = ((4096, 4096), (14336, 4096)), 128
_ROWS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 2048)
_TINY_SHAPES, _TINY_ROWS = ((64, 128),), (1, 17)
# Of the norm of the output: bfloat16 rounds it by 0.002, and PyTorch's op the zero points too.
_MOST_OFF = 0.02
_UP_TO_ROWS = {"_weight_int4pack_mm": 128, "kernel": 512}
# Rows up to and including: the least ratio to bfloat16.
_TARGETS = ((4, 1.5), (16, 1.2), (1 << 31, 0.9))


def quantized_linear(recorder: Recorder) -> None:
    """For each shape and number of bits: microseconds of one product by rows and backend, and the ratios."""
    import torch

    torch.manual_seed(0)
    # All of 4 bits first: they are what targets are set for.
    for bits in (4, 8):
        for shape in _TINY_SHAPES if recorder.tiny else _SHAPES:
            _one(recorder, shape, bits, _TINY_ROWS if recorder.tiny else _ROWS)


def _one(recorder: Recorder, shape: tuple[int, int], bits: int, rows: tuple[int, ...]) -> None:
    import torch

    from labkit.kernels.quantized_linear import InterleavedWeight
    from labkit.quantization import RTNConfig
    from labkit.quantization.rtn import round_to_nearest

    dtype = torch.float16 if recorder.tiny else torch.bfloat16
    dense = torch.randn(shape, dtype=dtype, device=recorder.device) / 64
    weight = round_to_nearest(dense, RTNConfig(bits=bits, group_size=_GROUP))
    laid_out = InterleavedWeight.of(weight)
    ops = _ops(recorder, dense, weight, laid_out)
    name = f"W{bits}A16 {shape[0]}x{shape[1]}"
    found: dict[int, dict[str, list[float]]] = {}
    for n in rows:
        x = torch.randn(n, shape[1], dtype=dtype, device=recorder.device)
        recorder.record(f"{name} {n} rows, off by", _check(ops, x, weight))
        found[n] = _microseconds(recorder, ops, x)
        recorder.record(f"{name} {n} rows, microseconds", found[n])
    _ratios(recorder, name, bits, laid_out.nbytes, found)


def _ops(recorder: Recorder, dense: object, weight: object, laid_out: object) -> dict[str, list[Callable]]:
    """By name, one function of x for each copy of the weight."""
    from labkit.quantization.crossover import product_ops

    ops = {"dense": product_ops(dense)}
    for name, backend in (("kernel", "triton"), ("dequantize and multiply", "torch"), ("auto", "auto")):
        ops[name] = product_ops(laid_out, backend)
    if weight.bits == 4 and recorder.device != "cpu":
        ops["_weight_int4pack_mm"] = _pytorch(weight, len(ops["kernel"]))
    if recorder.tiny:
        # A CPU's cache takes many copies of a tiny weight, and the interpreter its time.
        return {name: functions[:2] for name, functions in ops.items()}
    return ops


def _pytorch(weight: object, copies: int) -> list[Callable]:
    """PyTorch's own 4-bit product for CUDA: w = (q - 8) * s + b, two codes a byte, the even one above."""
    import torch

    codes = weight.codes()
    both = (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()
    scales = weight.scales.float()
    zeros = 8.0 if weight.zeros is None else weight.zeros.float()
    pairs = torch.stack((scales.T, ((8 - zeros) * scales).T), dim=-1).to(torch.bfloat16).contiguous()
    tiles = [torch.ops.aten._convert_weight_to_int4pack(both, 8) for _ in range(copies)]
    pairs = [pairs.clone() for _ in tiles]
    op, group = torch.ops.aten._weight_int4pack_mm, weight.group_size
    return [lambda x, t=t, p=p: op(x, t, group, p) for t, p in zip(tiles, pairs, strict=True)]


def _check(ops: dict[str, list[Callable]], x: object, weight: object) -> dict[str, float]:
    """How far each output is off, as a part of the reference's norm. Errors: RuntimeError for more than rounding."""
    import torch

    def off(y: object, expected: object) -> float:
        return ((y.double() - expected).norm() / expected.norm()).item()

    packed = x.double() @ weight.dequantize(torch.float64).T
    found = {name: off(functions[0](x), packed) for name, functions in ops.items() if name != "dense"}
    wrong = {name: error for name, error in found.items() if not error < _MOST_OFF}
    if wrong:
        raise RuntimeError(f"quantized_linear: {wrong} off at {x.shape[0]} rows; rounding takes less than {_MOST_OFF}")
    return {name: float(f"{error:.2g}") for name, error in found.items()}


def _microseconds(recorder: Recorder, ops: dict[str, list[Callable]], x: object) -> dict[str, list[float]]:
    """Of one product: median, 10th and 90th percentile. What is slow at many rows is left out there."""
    from labkit.quantization.crossover import time_products

    chosen = {name: f for name, f in ops.items() if x.shape[0] <= _UP_TO_ROWS.get(name, x.shape[0])}
    timings = time_products(chosen, x, min_run_s=1e-3 if recorder.tiny else 0.01)
    return {name: [round(1e6 * s, 3) for s in (t.median, t.p10, t.p90)] for name, t in timings.items()}


def _ratios(recorder: Recorder, name: str, bits: int, nbytes: int, found: dict[int, dict[str, list[float]]]) -> None:
    """Against bfloat16; the bandwidth at one row; and the first rows at which dequantizing is the faster."""
    medians = {n: {op: times[0] for op, times in by.items()} for n, by in found.items()}
    ratios = {n: {op: by["dense"] / t for op, t in by.items() if op != "dense"} for n, by in medians.items()}
    recorder.record(
        f"{name}, times bfloat16", {n: {op: round(r, 3) for op, r in by.items()} for n, by in ratios.items()}
    )
    recorder.record(f"{name}, bytes/s of the kernel at {min(found)} rows", nbytes / medians[min(found)]["kernel"] * 1e6)
    pays = [n for n, by in medians.items() if by["dequantize and multiply"] < by.get("kernel", float("inf"))]
    recorder.record(f"{name}, dequantizing pays from rows", min(pays, default=None))
    if bits != 4:
        return
    below = 0
    for rows, least in _TARGETS:
        worst = min((by["auto"] for n, by in ratios.items() if below < n <= rows), default=None)
        if worst is not None:
            recorder.target(
                f"{name}, {below + 1} to {min(rows, max(found))} rows, times bfloat16", worst, at_least=least
            )
        below = rows
