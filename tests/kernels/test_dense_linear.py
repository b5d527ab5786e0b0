"""dense_linear against its reference, and the choice of backend."""

import sys

import pytest
import torch
import torch.nn.functional as F

from labkit.kernels import BackendUnavailable, choose_backend, dense_linear
from labkit.kernels.dense_linear import _batched


@pytest.mark.parametrize("rows", [(1,), (1, 1), (2,), (4,), (2, 2), (7,)])
@pytest.mark.parametrize("shape", [(576, 576), (192, 576), (64, 33), (6, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_batched_errs_no_more_than_the_plain_call(rows: tuple[int, ...], shape: tuple[int, int], bias: bool) -> None:
    weight, x = torch.randn(shape), torch.randn(*rows, shape[1])
    b = torch.randn(shape[0]) if bias else None
    exact = dense_linear(x.double(), weight.double(), b if b is None else b.double(), backend="reference")
    got = dense_linear(x, weight, b, backend="batched")
    assert got.shape == (*rows, shape[0]) and got.dtype == torch.float32
    plain_error = (F.linear(x, weight, b) - exact).abs().max()
    # Or no more than one running sum in float32: some libraries sum the plain call in blocks, which errs less.
    running_sum = shape[1] * torch.finfo(torch.float32).eps / 2
    assert (got - exact).abs().max() <= 2 * plain_error + running_sum + 1e-6


def test_batched_takes_a_strided_input() -> None:
    weight, wide = torch.randn(8, 16), torch.randn(3, 32)
    x = wide[:, ::2]
    torch.testing.assert_close(dense_linear(x, weight, backend="batched"), F.linear(x, weight))


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_backend_agrees(backend: str, dtype: torch.dtype) -> None:
    weight, x = torch.randn(48, 32, dtype=dtype), torch.randn(2, 5, 32, dtype=dtype)
    torch.testing.assert_close(dense_linear(x, weight, backend=backend), F.linear(x, weight))


def test_an_empty_input_gives_an_empty_output() -> None:
    assert dense_linear(torch.zeros(0, 16), torch.zeros(8, 16)).shape == (0, 8)


def test_a_backend_asked_for_by_name_does_not_fall_back() -> None:
    with pytest.raises(BackendUnavailable, match="for float32; the weight is bfloat16"):
        dense_linear(torch.zeros(1, 4).bfloat16(), torch.zeros(8, 4).bfloat16(), backend="batched")
    with pytest.raises(BackendUnavailable, match="cannot be cut"):
        dense_linear(torch.zeros(1, 4), torch.zeros(4, 8).t(), backend="batched")


def test_the_choice_says_why_and_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    room = sys.modules["labkit.kernels.dense_linear"]
    weight = torch.randn(64, 64)
    assert "more than the 4" in choose_backend("dense_linear", torch.zeros(5, 64), weight).reason
    ran: list[int] = []
    monkeypatch.setattr(room, "_batched", lambda x, w, b: ran.append(1) or _batched(x, w, b))
    for speedup, name in ((2.0, "batched"), (1.0, "torch")):
        monkeypatch.setattr(room, "_batched_speedup", lambda rows, threads, s=speedup: s)
        ran.clear()
        choice = choose_backend("dense_linear", torch.zeros(1, 64), weight)
        dense_linear(torch.zeros(1, 64), weight)
        assert choice.name == name and f"{speedup:.2f} times" in choice.reason and bool(ran) == (name == "batched")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: dense_linear(torch.zeros(3), torch.zeros(4, 5)), "weight"),
        (lambda: dense_linear(torch.zeros(5), torch.zeros(5)), "weight"),
        (lambda: dense_linear(torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(1)), "bias"),
        (lambda: dense_linear(torch.zeros(2, 5), torch.zeros(4, 5), torch.zeros(4).double()), "bias"),
        (lambda: dense_linear(torch.zeros(2, 5).double(), torch.zeros(4, 5)), "weight"),
        (lambda: dense_linear(torch.zeros(2, 5), torch.zeros(4, 5, device="meta")), "weight"),
        (lambda: choose_backend("dense_linear", torch.zeros(5)), "tensors"),
        (lambda: dense_linear([1.0], torch.zeros(4, 1)), "x"),
        (lambda: choose_backend("dense_linear", torch.zeros(3), torch.zeros(4, 5)), "weight"),
        (lambda: dense_linear(torch.zeros(5), torch.zeros(4, 5), backend="cublas"), "backend"),
        (lambda: choose_backend("dense_linaer", torch.zeros(1)), "op"),
    ],
)
def test_refusals(call: object, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: got"):
        call()
