"""W4A16 and W8A16 beside bfloat16, by rows: time from a CUDA graph, share of bandwidth, and where dequantizing pays.

Each graph goes through as many copies of the weight as are larger than four times the L2 cache, since in a decode step
every matrix comes from memory.
"""

from collections.abc import Callable

from labkit.cli.gpu_sections import Recorder

_SHAPES, _GROUP = ((4096, 4096), (14336, 4096)), 128
_ROWS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 2048)
_TINY_SHAPES, _TINY_ROWS = ((64, 128),), (1, 17)
# Rows up to and including: the least ratio to bfloat16.
_TARGETS = ((4, 1.5), (16, 1.2), (1 << 31, 0.9))


def quantized_linear(recorder: Recorder) -> None:
    """For each shape and number of bits: microseconds of one product by rows and backend, and the ratios."""
    import torch

    torch.manual_seed(0)
    for shape in _TINY_SHAPES if recorder.tiny else _SHAPES:
        for bits in (4, 8):
            _one(recorder, shape, bits, _TINY_ROWS if recorder.tiny else _ROWS)


def _one(recorder: Recorder, shape: tuple[int, int], bits: int, rows: tuple[int, ...]) -> None:
    import torch

    from labkit.quantization import RTNConfig
    from labkit.quantization.rtn import round_to_nearest

    dtype = torch.float16 if recorder.tiny else torch.bfloat16
    dense = torch.randn(shape, dtype=dtype, device=recorder.device) / 64
    weight = round_to_nearest(dense, RTNConfig(bits=bits, group_size=_GROUP))
    ops = _ops(recorder, dense, weight, bits)
    name = f"W{bits}A16 {shape[0]}x{shape[1]}"
    found: dict[int, dict[str, float]] = {}
    for n in rows:
        x = torch.randn(n, shape[1], dtype=dtype, device=recorder.device)
        found[n] = _microseconds(recorder, ops, x)
        recorder.record(f"{name} {n} rows, microseconds", found[n])
    _ratios(recorder, name, bits, weight.nbytes, found)


def _ops(recorder: Recorder, dense: object, weight: object, bits: int) -> dict[str, list[Callable]]:
    """By name, one function of x for each copy of the weight."""
    from labkit.kernels.quantized_linear import InterleavedWeight
    from labkit.quantization.crossover import product_ops

    laid_out = InterleavedWeight.of(weight)
    ops = {"dense": product_ops(dense)}
    for name, backend in (("kernel", "triton"), ("dequantize and multiply", "torch"), ("auto", "auto")):
        ops[name] = product_ops(laid_out, backend)
    if bits == 4 and recorder.device != "cpu":
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


def _microseconds(recorder: Recorder, ops: dict[str, list[Callable]], x: object) -> dict[str, float]:
    """Of one product, in turns, by the median."""
    from labkit.measure import compare_ops

    runs = {name: _graph(recorder, functions, x) for name, functions in ops.items()}
    timings = compare_ops(runs, device=recorder.device, min_run_s=1e-3 if recorder.tiny else 0.03, warmup=1)
    return {name: round(1e6 * timing.median / len(ops[name]), 3) for name, timing in timings.items()}


def _graph(recorder: Recorder, functions: list[Callable], x: object) -> Callable[[], object]:
    """All of them one after the other, from one CUDA graph; as they are on a CPU."""
    import torch

    def every() -> None:
        for function in functions:
            function(x)

    if recorder.device == "cpu":
        return every
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        functions[0](x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    return graph.replay


def _ratios(recorder: Recorder, name: str, bits: int, nbytes: int, found: dict[int, dict[str, float]]) -> None:
    """Against bfloat16; the bandwidth at one row; and the first rows at which dequantizing is the faster."""
    ratios = {n: {op: times["dense"] / t for op, t in times.items() if op != "dense"} for n, times in found.items()}
    recorder.record(
        f"{name}, times bfloat16", {n: {op: round(r, 3) for op, r in by.items()} for n, by in ratios.items()}
    )
    recorder.record(f"{name}, bytes/s of the kernel at {min(found)} rows", nbytes / found[min(found)]["kernel"] * 1e6)
    pays = [n for n, t in found.items() if t["dequantize and multiply"] < t["kernel"]]
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
