"""INT8 and FP8 weights and inputs beside bfloat16, on one square matrix: speed by rows, and what the sums are off."""

from labkit.cli.gpu_sections import Recorder

_SIZE, _ROWS = 4096, (1, 16, 256, 2048)
_TINY_SIZE, _TINY_ROWS = 64, (1, 17)


def eight_bit(recorder: Recorder) -> None:
    """Quantizing the inputs counts: it is part of each call. In turns, since clocks drift."""
    import torch

    from labkit.quantization import fp8, smoothquant

    size, rows = (_TINY_SIZE, _TINY_ROWS) if recorder.tiny else (_SIZE, _ROWS)
    torch.manual_seed(0)
    dense = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=recorder.device).requires_grad_(False)
    modules = {"bfloat16": dense, "int8": smoothquant.quantize_rows(dense.weight)}
    reason = fp8.why_no_fp8(dense.weight.device)
    if reason:
        recorder.record("fp8", reason)
    else:
        modules["fp8"] = fp8.quantize_rows(dense.weight)
    for n in rows:
        x = torch.randn(n, size, dtype=torch.bfloat16, device=recorder.device)
        recorder.record(f"relative_error_{n}_rows", _errors(modules, x))
        recorder.record(f"microseconds_{n}_rows", _microseconds(modules, x, recorder))


def _errors(modules: dict, x: object) -> dict[str, float]:
    """Root mean square of what the output is off from the unrounded input times the dequantized weight, as a part of
    that: the rounding of the inputs alone."""
    found = {}
    for name, module in modules.items():
        weight = module.weight.double() if name == "bfloat16" else module.dequantize().double()
        expected = x.double() @ weight.T
        found[name] = ((module(x).double() - expected).square().mean() / expected.square().mean()).sqrt().item()
    return found


def _microseconds(modules: dict, x: object, recorder: Recorder) -> dict[str, float]:
    """Median of each, over three turns."""
    import statistics

    from labkit.measure import time_op

    seconds: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(1 if recorder.tiny else 3):
        for name, module in modules.items():
            timing = time_op(lambda module=module: module(x), device=recorder.device, min_run_s=0.1)
            seconds[name].append(timing.median)
    return {name: round(1e6 * statistics.median(values), 2) for name, values in seconds.items()}
