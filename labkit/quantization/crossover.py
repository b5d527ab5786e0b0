"""One matrix, packed and not, by rows of its input: where packing stops paying, and how near its roof a product is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit import _check
from labkit.hardware import Ceilings, describe
from labkit.kernels import choose_backend, quantized_linear
from labkit.kernels.quantized_linear import Weight, decode_layout
from labkit.measure import Timing, compare_ops
from labkit.quantization.rtn import RTNConfig, round_to_nearest
from labkit.roofline import attainable_flops

DENSE = "16 bits"
_FEWEST_COPIES = 2


def product_ops(weight: torch.Tensor | Weight, backend: str = "auto") -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Functions `x -> x @ weight.T`, one for each of as many copies of the weight as exceed four times the last cache.

    In a decode step every matrix comes from memory; called one after the other, so do these.
    """
    cache = describe(weight.device).cache_bytes or 2**25
    copies = max(_FEWEST_COPIES, -(-4 * cache // weight.nbytes))
    if isinstance(weight, torch.Tensor):
        return [lambda x, w=w: F.linear(x, w) for w in (weight.clone() for _ in range(copies))]
    clones = (weight.map(torch.clone) for _ in range(copies))
    return [lambda x, w=w: quantized_linear(x, w, backend=backend) for w in clones]


@dataclass(frozen=True)
class Product:
    """One way to hold the weight, at one number of rows: the backend that ran, the Timing of a product, and what it
    moves and computes."""

    name: str
    rows: int
    backend: str
    timing: Timing
    bytes: int
    flops: int

    @property
    def rate(self) -> float:
        """FLOP/s reached."""
        return self.flops / self.timing.median


@dataclass(frozen=True)
class Crossover:
    """All products of a sweep, by name over rows."""

    rows: tuple[int, ...]
    products: tuple[Product, ...]

    def of(self, name: str) -> list[Product]:
        """The products of one name, by rows. Errors: ValueError for a name that is not there."""
        _check.choice("name", name, self.names)
        return [product for product in self.products if product.name == name]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(product.name for product in self.products))

    def speed_up(self, name: str) -> list[float]:
        """Times as fast as the weight in 16 bits, by rows."""
        pairs = zip(self.of(DENSE), self.of(name), strict=True)
        return [dense.timing.median / packed.timing.median for dense, packed in pairs]

    def rate(self, name: str) -> list[float]:
        """FLOP/s reached, by rows."""
        return [product.rate for product in self.of(name)]

    def roof(self, name: str, ceilings: Ceilings, dtype: torch.dtype = torch.bfloat16) -> list[float]:
        """FLOP/s that the bytes and the matmul peak of `dtype` allow, by rows."""
        return [attainable_flops(product.flops / product.bytes, ceilings, dtype) for product in self.of(name)]

    def pays_until(self, name: str) -> int | None:
        """The most rows up to which it is faster than 16 bits at every step of the sweep; None where at none."""
        paying = itertools.takewhile(lambda pair: pair[1] > 1, zip(self.rows, self.speed_up(name), strict=True))
        return max((rows for rows, _ in paying), default=None)


def measure_crossover(
    shape: tuple[int, int] = (2048, 2048),
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
    *,
    bits: Sequence[int] = (8, 4),
    group_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    min_run_s: float = 0.05,
) -> Crossover:
    """Time `x (rows, in) @ weight (out, in).T`, in turns: in 16 bits, packed by each of `bits` as it decodes fastest,
    and at the last of them dequantized before each product.

    Errors: ValueError for groups that do not divide the columns.
    """
    device = _check.device("device", device)
    _check.require(bool(rows) and list(rows) == sorted(set(rows)), "rows", rows, "rising numbers of rows")
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape, generator=generator).div_(shape[1] ** 0.5).to(device, dtype)
    held: dict[str, torch.Tensor | Weight] = {DENSE: dense}
    for width in bits:
        packed = round_to_nearest(dense, RTNConfig(bits=width, group_size=group_size))
        held[f"{width} bits"] = decode_layout(packed, dtype)
    ops = {name: product_ops(weight) for name, weight in held.items()}
    # On a GPU a kernel dequantizes what is laid out; on a CPU only the portable form can be.
    first, last = f"{bits[-1]} bits, dequantized first", held[f"{bits[-1]} bits"]
    held[first] = packed if device.type == "cpu" else last
    ops[first] = product_ops(held[first], "torch")
    found = []
    for n in rows:
        x = torch.randn(n, shape[1], generator=generator).to(device, dtype)
        for name, timing in time_products(ops, x, min_run_s=min_run_s).items():
            moved = held[name].nbytes + x.element_size() * n * sum(shape)
            moved += 2 * dense.nbytes if name == first else 0  # written, and read again
            found.append(Product(name, n, _backend(x, held[name], name == first), timing, moved, 2 * n * dense.numel()))
    return Crossover(tuple(rows), tuple(found))


def _backend(x: torch.Tensor, weight: torch.Tensor | Weight, by_name: bool) -> str:
    if isinstance(weight, torch.Tensor) or by_name:
        return "torch"
    return choose_backend("quantized_linear", x, weight).name


def time_products(
    ops: Mapping[str, Sequence[Callable[[torch.Tensor], torch.Tensor]]], x: torch.Tensor, *, min_run_s: float
) -> dict[str, Timing]:
    """Seconds of one product by name, in turns; each name's functions are called one after the other. On a GPU all of
    them come from one CUDA graph, as in a decode step, where the calls themselves would take longer than the products.
    """
    if x.device.type != "cuda":
        turns = {name: _in_turn(functions, x) for name, functions in ops.items()}
        return compare_ops(turns, device=x.device, min_run_s=min_run_s, warmup=1)
    graphs = {name: _graph(functions, x) for name, functions in ops.items()}
    timings = compare_ops(graphs, device=x.device, min_run_s=min_run_s, warmup=1)
    return {name: _share(timing, len(ops[name])) for name, timing in timings.items()}


def _in_turn(functions: Sequence[Callable], x: torch.Tensor) -> Callable[[], object]:
    """A function that calls the next of `functions` each time."""
    following = itertools.cycle(functions)
    return lambda: next(following)(x)


def _graph(functions: Sequence[Callable], x: torch.Tensor) -> Callable[[], object]:
    """All of them one after the other, from one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        functions[0](x)  # what is compiled and set up at the first call
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function(x)
    return graph.replay


def _share(timing: Timing, calls: int) -> Timing:
    return Timing(timing.median / calls, timing.p10 / calls, timing.p90 / calls, timing.n)
