"""Attention of a decode step to a long cache: bfloat16 and codes, in blocks and contiguous, beside PyTorch's kernel.

Each time is that of a CUDA graph over so many caches that all data comes from memory. Every result is compared with the
reference before it is timed.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from labkit.cli.gpu_sections import Recorder

# Of the norm of the output, more than bfloat16 rounds.
_MOST_OFF = 0.02
_BITS = (8, 4, 2)
# The least bf16 speed-up.
_TARGETS = {8: 1.7, 4: 2.2}
_SHARE = 0.85


@dataclass(frozen=True)
class _Shape:
    batch: int = 16
    kv_heads: int = 8
    heads: int = 32
    head_dim: int = 128
    lengths: tuple[int, ...] = (16384, 32768)
    blocks: tuple[int, ...] = (64, 16)
    group: int = 32
    recent: int = 32


_TINY = _Shape(2, 1, 2, 64, (64,), (32, 16), 32, 32)


def decode_attention(recorder: Recorder) -> None:
    """Microseconds, share of the measured read bandwidth and speed beside bfloat16, by length and batch."""
    import torch

    from labkit.hardware import measure_ceilings

    torch.manual_seed(0)
    shape = _TINY if recorder.tiny else _Shape()
    bandwidth = measure_ceilings(recorder.device).read_bandwidth
    for length in shape.lengths:
        caches = _caches(recorder, shape, length)
        for batch in (shape.batch, 1):
            name = f"batch {batch}, {length} tokens"
            found = _one(recorder, name, shape, length, batch, caches)
            _ratios(recorder, name, shape, length, batch, found, bandwidth)
        del caches


def _caches(recorder: Recorder, shape: _Shape, length: int) -> dict[str, tuple]:
    """By name keys, values and block table."""
    import torch

    from labkit.kernels import kv_quantize

    # The interpreter multiplies float16 alone rightly.
    dtype = torch.float16 if recorder.tiny else torch.bfloat16
    size = (shape.batch, shape.kv_heads, length, shape.head_dim)
    keys, values = (torch.randn(size, dtype=dtype, device=recorder.device) for _ in range(2))
    caches = {"contiguous": (keys, values, None)}
    for block in shape.blocks:
        caches[f"blocks of {block}"] = _in_blocks(keys, values, block)
    block = shape.blocks[0]
    keys, values, table = caches[f"blocks of {block}"]
    counts = torch.full((shape.batch,), length - shape.recent, dtype=torch.int32, device=recorder.device)
    recent = [torch.randn(*size[:2], shape.recent, size[3], dtype=dtype, device=recorder.device) for _ in range(2)]
    for bits in _BITS:
        codes = [
            dataclasses.replace(
                kv_quantize(x, bits=bits, group_size=shape.group, axis=axis), recent=late, n_quantized=counts
            )
            for x, axis, late in ((keys, "channel", recent[0]), (values, "token", recent[1]))
        ]
        caches[f"int{bits}"] = (*codes, table)
    return caches


def _in_blocks(keys: object, values: object, block: int) -> tuple:
    """The same tokens in blocks that lie in any order."""
    import torch

    batch, columns = keys.shape[0], keys.shape[2] // block
    order = torch.randperm(batch * columns, device=keys.device)
    cut = [x.unflatten(2, (columns, block)).transpose(1, 2).flatten(0, 1)[order] for x in (keys, values)]
    return *cut, torch.argsort(order).view(batch, columns).int()


def _row(x: object, row: int, paged: bool) -> object:
    """Keys or values of one row; blocks stay where they are."""
    import torch

    at = slice(row, row + 1)
    if isinstance(x, torch.Tensor):
        return x if paged else x[at]
    return dataclasses.replace(x, recent=x.recent[at], n_quantized=x.n_quantized[at])


def _functions(caches: dict[str, tuple], lengths: object, batch: int) -> dict[str, list[Callable]]:
    """By name functions of q: one over all rows, or one for each of some rows."""
    import torch.nn.functional as F

    from labkit.kernels import decode_attention as attend

    found: dict[str, list[Callable]] = {}
    rows = [None] if batch > 1 else range(min(8, lengths.shape[0]))
    for name, (keys, values, table) in caches.items():
        found[name] = []
        for row in rows:
            k, v = (x if row is None else _row(x, row, table is not None) for x in (keys, values))
            n, t = (lengths, table) if row is None else (lengths[row : row + 1], table)
            t = t if row is None or t is None else t[row : row + 1]
            found[name].append(lambda q, k=k, v=v, n=n, t=t: attend(q, k, v, n, block_table=t, backend="triton"))
    keys, values, _ = caches["contiguous"]
    both = [(keys, values) if row is None else (keys[row : row + 1], values[row : row + 1]) for row in rows]
    found["F.scaled_dot_product_attention"] = [
        lambda q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in both
    ]
    return found


def _one(
    recorder: Recorder, name: str, shape: _Shape, length: int, batch: int, caches: dict[str, tuple]
) -> dict[str, float]:
    """Check all and time all, in turns; microseconds by name."""
    import torch

    from labkit.quantization.crossover import time_products

    dtype = caches["contiguous"][0].dtype
    q = torch.randn(batch, shape.heads, 1, shape.head_dim, dtype=dtype, device=recorder.device)
    lengths = torch.full((shape.batch,), length, dtype=torch.int32, device=recorder.device)
    ops = _functions(caches, lengths, batch)
    recorder.record(f"{name}, off by", _check(ops, q, caches, lengths))
    timings = time_products(ops, q, min_run_s=1e-3 if recorder.tiny else 0.02)
    found = {op: [round(1e6 * s, 3) for s in (t.median, t.p10, t.p90)] for op, t in timings.items()}
    recorder.record(f"{name}, microseconds", found)
    return {op: times[0] for op, times in found.items()}


def _check(ops: dict[str, list[Callable]], q: object, caches: dict[str, tuple], lengths: object) -> dict[str, float]:
    """How far each output is off, as a part of the reference's norm. Errors: RuntimeError for more than rounding."""
    from labkit.kernels import decode_attention as attend

    found = {}
    for name, functions in ops.items():
        keys, values, table = caches.get(name, caches["contiguous"])
        n, batch = lengths[: q.shape[0]], q.shape[0]
        if batch < lengths.shape[0]:
            keys, values = (_row(x, 0, table is not None) for x in (keys, values))
            table = None if table is None else table[:1]
        expected = attend(q, keys, values, n, block_table=table, backend="reference").double()
        found[name] = float(f"{((functions[0](q).double() - expected).norm() / expected.norm()).item():.2g}")
    wrong = {name: error for name, error in found.items() if not error < _MOST_OFF}
    if wrong:
        raise RuntimeError(f"decode_attention: {wrong} off; rounding takes less than {_MOST_OFF}")
    return found


def _nbytes(shape: _Shape, length: int, batch: int, bits: int) -> float:
    """Bytes of keys and values, with scales and minimums of 16 bits where there are codes."""
    each = 2 * batch * shape.kv_heads * shape.head_dim
    if bits == 16:
        return each * length * 2
    return each * ((length - shape.recent) * (bits / 8 + 4 / shape.group) + shape.recent * 2)


def _ratios(
    recorder: Recorder, name: str, shape: _Shape, length: int, batch: int, found: dict[str, float], bandwidth: float
) -> None:
    """Shares of the bandwidth, and of bfloat16 in the blocks that the codes lie in."""
    bits_of = {op: int(op[3:]) if op.startswith("int") else 16 for op in found}
    shares = {op: _nbytes(shape, length, batch, bits_of[op]) / (us * 1e-6) / bandwidth for op, us in found.items()}
    recorder.record(f"{name}, share of read bandwidth", {op: round(share, 3) for op, share in shares.items()})
    plain = found[f"blocks of {shape.blocks[0]}"]
    times = {op: plain / us for op, us in found.items()}
    recorder.record(f"{name}, times bfloat16 in blocks", {op: round(ratio, 3) for op, ratio in times.items()})
    if batch == 1:
        return
    for op in (*(f"blocks of {block}" for block in shape.blocks), "contiguous"):
        recorder.target(f"{name}, bf16 {op}, share of read bandwidth", shares[op], at_least=_SHARE)
    for bits, least in _TARGETS.items():
        recorder.target(f"{name}, int{bits}, times bfloat16", times[f"int{bits}"], at_least=least)
