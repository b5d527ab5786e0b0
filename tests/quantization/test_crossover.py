"""The sweep over rows: what it multiplies, counts and compares; never how fast."""

import pytest
import torch

from labkit.hardware import Ceilings
from labkit.kernels import choose_backend
from labkit.kernels.quantized_linear import Int4PackWeight
from labkit.measure import Timing
from labkit.quantization import RTNConfig, crossover
from labkit.quantization.crossover import Crossover, Product, measure_crossover, product_ops
from labkit.quantization.rtn import round_to_nearest


def product(name: str, rows: int, seconds: float, nbytes: int = 100) -> Product:
    return Product(name, rows, "torch", Timing(seconds, seconds, seconds, 1), nbytes, 1000 * rows)


def sweep(*packed_seconds: float) -> Crossover:
    rows = tuple(2**i for i in range(len(packed_seconds)))
    products = [product("16 bits", n, 1.0) for n in rows]
    products += [product("4 bits", n, s, 25) for n, s in zip(rows, packed_seconds, strict=True)]
    return Crossover(rows, tuple(products))


def test_speed_up_and_where_it_ends() -> None:
    found = sweep(0.25, 0.5, 2.0, 0.5)
    assert found.speed_up("4 bits") == [4.0, 2.0, 0.5, 2.0] and found.names == ["16 bits", "4 bits"]
    assert found.pays_until("4 bits") == 2  # what comes after the first loss does not count
    assert sweep(2.0).pays_until("4 bits") is None and sweep(0.5, 0.5).pays_until("4 bits") == 2
    with pytest.raises(ValueError, match="^name: got '3 bits'"):
        found.of("3 bits")


def test_rates_and_roofs() -> None:
    found = sweep(0.5, 0.5)
    ceilings = Ceilings(10.0, 10.0, {torch.bfloat16: 500.0}, "made up", 1, {})
    assert found.rate("4 bits") == [2000.0, 4000.0]
    # 1000 and 2000 FLOPs over 100 and 25 bytes at 10 bytes/s, and never above the peak.
    assert found.roof("16 bits", ceilings) == [100.0, 200.0]
    assert found.roof("4 bits", ceilings) == [400.0, 500.0]


def test_a_small_sweep_counts_bytes_and_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = []
    monkeypatch.setattr(crossover, "choose_backend", lambda op, x, w: laid_out.append(w) or choose_backend(op, x, w))
    found = measure_crossover((32, 64), (1, 3), device="cpu", min_run_s=0.0)
    assert {type(weight) for weight in laid_out} == {Int4PackWeight} and len(laid_out) == 4
    assert found.names == ["16 bits", "8 bits", "4 bits", "4 bits, dequantized first"]
    for rows, dense, packed in zip((1, 3), found.of("16 bits"), found.of("4 bits"), strict=True):
        assert dense.flops == packed.flops == 2 * rows * 32 * 64
        assert dense.bytes == 2 * 32 * 64 + 2 * rows * 96
        assert 32 * 64 // 2 < packed.bytes - 2 * rows * 96 < 32 * 64
        assert dense.timing.median > 0
    both = zip(found.of("4 bits, dequantized first"), found.of("4 bits"), strict=True)
    # The offsets beside the scales of the layout for the CPU are 2 bytes more a group.
    assert all(first.bytes - packed.bytes == 2 * 2 * 32 * 64 - 2 * 32 for first, packed in both)
    with pytest.raises(ValueError, match="^rows"):
        measure_crossover((32, 64), (3, 1), device="cpu")


def test_copies_pass_the_cache_and_all_give_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = round_to_nearest(torch.randn(16, 64), RTNConfig(bits=4, group_size=32))
    info = crossover.describe("cpu")
    monkeypatch.setattr(
        crossover, "describe", lambda _: type(info)(**{**vars(info), "cache_bytes": 10 * weight.nbytes})
    )
    ops, x = product_ops(weight), torch.randn(2, 64)
    assert len(ops) == 40
    for op in ops[::13]:
        torch.testing.assert_close(op(x), x @ weight.dequantize().T)
    dense = torch.randn(16, 64)
    assert torch.equal(product_ops(dense)[0](x), torch.nn.functional.linear(x, dense))
