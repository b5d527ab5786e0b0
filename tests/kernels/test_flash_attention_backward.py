"""FlashAttention's backward kernels in Triton's interpreter, against autograd of the formula in float64.

The output and the sums that they take are worked out here, not by the forward kernel. Around the data, and in keys that
are padding, lies NaN: one read too many shows. The interpreter multiplies float16 alone rightly.
"""

import inspect
import math
from dataclasses import dataclass

import pytest
import torch

from labkit.kernels.flash_attention import backward as room
from labkit.kernels.flash_attention import backward_kernels, blocks
from labkit.kernels.flash_attention.backward import backward

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel"),
    # Of weights that are masked right after.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Problem:
    """Queries, keys, values and the output's gradient; `seen` `(batch, kv_len)`: which keys are no padding."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    seen: torch.Tensor
    causal: bool
    scale: float

    def sees(self) -> torch.Tensor:
        """`(batch, 1, q_len, kv_len)`."""
        q_len, kv_len = self.q.shape[2], self.k.shape[2]
        sees = self.seen[:, None, None, :].expand(-1, 1, q_len, -1)
        places = torch.arange(q_len)[:, None] + kv_len - q_len
        return sees & (torch.arange(kv_len) <= places) if self.causal else sees

    def formula(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output, each query's sum as a logarithm to base 2, and the gradients."""
        there = self.seen[:, None, :, None]
        leaves = [self.q.to(dtype), *(x.where(there, 0).to(dtype) for x in (self.k, self.v))]
        q, k, v = (x.requires_grad_() for x in leaves)
        each, sees = q.shape[1] // k.shape[1], self.sees()
        scores = q @ k.repeat_interleave(each, 1).transpose(2, 3) * self.scale
        weights = scores.masked_fill(~sees, torch.finfo(dtype).min).softmax(-1).where(sees, 0)
        out = weights @ v.repeat_interleave(each, 1)
        lse = scores.detach().masked_fill(~sees, -math.inf).logsumexp(-1) * LOG2_E
        return out.detach(), lse, torch.autograd.grad(out, (q, k, v), self.dout.to(dtype))

    def run(self, out: torch.Tensor, lse: torch.Tensor, **options: object) -> tuple[torch.Tensor, ...]:
        options = {"bounds": None, "padding_mask": None} | options
        out, lse = out.to(self.q.dtype), lse.float()
        return backward(self.dout, self.q, self.k, self.v, out, lse, self.causal, self.scale, **options)


def guarded(*shape: int) -> torch.Tensor:
    """Random float16 with NaN on all sides, where a descriptor can still read it."""
    whole = torch.full((*shape[:2], shape[2] + 2, shape[3] + 16), math.nan, dtype=torch.float16)
    inner = whole[:, :, 1:-1, 8:-8]
    inner.copy_(torch.randn(shape))
    return inner


def make(
    q_len: int,
    kv_len: int,
    *,
    causal: bool = True,
    head_dim: int = 32,
    heads: int = 2,
    kv_heads: int = 1,
    batch: int = 1,
    scale: float | None = None,
) -> Problem:
    q, dout = guarded(batch, heads, q_len, head_dim), guarded(batch, heads, q_len, head_dim)
    k, v = guarded(batch, kv_heads, kv_len, head_dim), guarded(batch, kv_heads, kv_len, head_dim)
    seen = torch.ones(batch, kv_len, dtype=torch.bool)
    return Problem(q, k, v, dout, seen, causal, head_dim**-0.5 if scale is None else scale)


def pad(problem: Problem, seen: torch.Tensor) -> Problem:
    """With padding where `seen` is False, and NaN in it."""
    for x in (problem.k, problem.v):
        x.masked_fill_(~seen[:, None, :, None], math.nan)
    return Problem(*(getattr(problem, n) for n in ("q", "k", "v", "dout")), seen, problem.causal, problem.scale)


def bounds_of(seen: torch.Tensor) -> torch.Tensor:
    found = [row.nonzero().flatten().tolist() or [0, -1] for row in seen]
    return torch.tensor([[keys[0], keys[-1] + 1] for keys in found], dtype=torch.int32)


def check(problem: Problem, **options: object) -> tuple[torch.Tensor, ...]:
    """At most twice the error of the formula by PyTorch in float16, plus what float32 rounds."""
    out, lse, expected = problem.formula(torch.float64)
    got = problem.run(out, lse, **options)
    plain = problem.formula(torch.float16)[2]
    for name, x, exact, low, like in zip("qkv", got, expected, plain, (problem.q, problem.k, problem.v), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype
        off = (low.double() - exact).abs().max()
        assert (x.double() - exact).abs().max() <= 2 * off + 1e-5 * (1 + exact.abs().max()), f"d{name}"
    return got


readers = pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
masked = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@readers
@masked
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127])
def test_every_length(length: int, causal: bool, described: bool) -> None:
    check(make(length, length, causal=causal), described=described)


@readers
@masked
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 97), (37, 101), (101, 37), (64, 131), (89, 1), (130, 67)])
def test_queries_and_keys_of_different_lengths(q_len: int, kv_len: int, causal: bool, described: bool) -> None:
    """Aligned to the end: of more queries than keys the first see nothing, and their gradients are zero."""
    dq, _, _ = check(make(q_len, kv_len, causal=causal), described=described)
    assert not dq[:, :, : max(0, q_len - kv_len if causal else 0)].any()


@masked
@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (64, 16), (128, 32)])
def test_every_shape_of_tile(blocks: tuple[int, int], causal: bool) -> None:
    check(make(75, 91, causal=causal, head_dim=16), block_sizes=blocks)
    check(make(75, 91, causal=causal, head_dim=16), block_sizes=blocks, described=True)


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_number_of_query_heads_a_kv_head(each: int) -> None:
    check(make(17, 45, heads=2 * each, kv_heads=2, head_dim=16), described=each % 2 == 0)


@readers
@pytest.mark.parametrize("head_dim", [16, 24, 64, 80, 96, 128, 256])
def test_every_size_of_head(head_dim: int, described: bool) -> None:
    check(make(39, 50, head_dim=head_dim), described=described)


def seen_keys(padding: str, kv_len: int) -> torch.Tensor:
    """Of three rows, the last of which has no padding (and, where all of a row is, the second nothing but)."""
    j, seen = torch.arange(kv_len), torch.ones(3, kv_len, dtype=torch.bool)
    if padding == "holes":
        seen[:2] = torch.rand(2, kv_len) > 0.4
    elif padding == "left":
        seen[0], seen[1] = j >= 5, j >= 50
    else:
        seen[0], seen[1] = j < kv_len - 5, j < (20 if padding == "right" else 0)
    return seen


@readers
@masked
@pytest.mark.parametrize(
    ("padding", "with_mask"),
    [("left", False), ("right", False), ("nothing", False), ("left", True), ("nothing", True), ("holes", True)],
)
def test_padding(padding: str, with_mask: bool, causal: bool, described: bool) -> None:
    """Keys that are padding get zeros, whatever they hold, and so do queries that see nothing else."""
    problem = pad(make(41, 77, batch=3, heads=1, causal=causal, head_dim=16), seen_keys(padding, 77))
    mask = problem.seen if with_mask else None
    # A stride of 2 between the mask's keys and the bounds' numbers.
    spread = None if mask is None else mask.repeat_interleave(2, 1)[:, ::2]
    bounds = bounds_of(problem.seen).repeat_interleave(2, 1)[:, ::2]
    dq, dk, dv = check(
        problem, bounds=bounds, padding_mask=spread, described=described, block_sizes=(16, 32) if with_mask else None
    )
    nobody = ~problem.sees().any(-1)
    assert not dq.where(nobody[..., None], 0).any()
    assert not dk.where(~problem.seen[:, None, :, None], 0).any()
    assert not dv.where(~problem.seen[:, None, :, None], 0).any()


def test_a_mask_alone_needs_no_bounds() -> None:
    problem = pad(make(61, 77, batch=3, head_dim=16), seen_keys("holes", 77))
    check(problem, padding_mask=problem.seen)


@masked
@pytest.mark.parametrize("scale", [0.0, 1e-4, 3.0, -0.2])
def test_logits_of_every_size(scale: float, causal: bool) -> None:
    """Up to a hundred in either direction, where a single key takes all the weight."""
    check(make(70, 70, causal=causal, scale=scale))


def test_tiles_above_the_diagonal_are_not_visited() -> None:
    """NaN in what only the first query and the last key bring spreads as far as the tiles that they are in."""
    problem = make(128, 128, head_dim=16)
    out, lse, _ = problem.formula(torch.float64)
    problem.dout[:, :, 0] = math.nan
    _, dk, dv = problem.run(out, lse, block_sizes=(32, 32))
    assert dk[:, :, 32:].isfinite().all() and dv[:, :, 32:].isfinite().all() and dv[:, :, 0].isnan().all()
    problem.dout[:, :, 0] = 0.0
    problem.k[:, :, -1] = math.nan
    dq, dk, _ = problem.run(out, lse, block_sizes=(32, 32))
    assert dq[:, :, :96].isfinite().all() and dk[:, :, :96].isfinite().all() and dq[:, :, -1].isnan().all()


@readers
def test_any_layout(described: bool) -> None:
    """Tokens before heads, as a model's projections leave them; and gradients laid out like what they belong to."""
    problem = make(40, 53, heads=4, kv_heads=2, batch=2)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.q, problem.k, problem.v, problem.dout)]
    got = check(Problem(*turned, problem.seen, True, problem.scale), described=described)
    assert all(x.stride() == like.stride() for x, like in zip(got, turned, strict=False))
    columns = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in turned]
    assert all(x.stride(3) != 1 for x in columns)
    check(Problem(*columns, problem.seen, True, problem.scale), described=described)


def test_an_expanded_gradient_and_expanded_keys() -> None:
    """As sum() gives it, every number in the same place; and one K for several rows."""
    problem = make(40, 53, heads=4, kv_heads=2, batch=2)
    ones = torch.ones((), dtype=torch.float16).expand(problem.q.shape)
    k, v = (x[:1].expand(2, -1, -1, -1) for x in (problem.k, problem.v))
    check(Problem(problem.q, k, v, ones, problem.seen, True, problem.scale))


def test_the_same_bits_every_time() -> None:
    problem = pad(make(61, 77, batch=3, heads=6, kv_heads=2, head_dim=16), seen_keys("holes", 77))
    out, lse, _ = problem.formula(torch.float64)
    options = {"bounds": bounds_of(problem.seen), "padding_mask": problem.seen}
    first = problem.run(out, lse, **options)
    assert all(torch.equal(a, b) for a, b in zip(problem.run(out, lse, **options), first, strict=True))
    # The interpreter runs programs one after another, and would not show sums in whatever order they come.
    assert "tl.atomic" not in inspect.getsource(backward_kernels)


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (1, 0, 0)])
def test_empty(batch: int, q_len: int, kv_len: int) -> None:
    q, k = torch.randn(batch, 4, q_len, 16).half(), torch.randn(batch, 2, kv_len, 16).half()
    got = backward(q, q, k, k, q, torch.zeros(batch, 4, q_len), True, 0.25, None, None)
    assert [x.shape for x in got] == [q.shape, k.shape, k.shape] and not any(x.any() for x in got)


@pytest.mark.parametrize(
    ("capability", "shift", "padded", "described"),
    [(90, 0, False, 8), (100, 0, False, 8), (90, 1, False, 0), (90, 0, True, 4), (80, 0, False, 0)],
)
def test_descriptors_where_the_copy_engine_can_read(
    capability: int, shift: int, padded: bool, described: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of q, k, v and dO, in either kernel; where there is padding not in dQ's, which must not read it."""
    made = []
    monkeypatch.setattr(room, "capability", lambda device: capability)
    monkeypatch.setattr(room, "describe", lambda *each, of=room.describe: made.append(each) or of(*each))
    problem = make(40, 40)
    if shift:
        q = torch.randn(1, 2, 40, 33).half()[..., shift:]
        problem = Problem(q, *(getattr(problem, n) for n in ("k", "v", "dout", "seen", "causal", "scale")))
    check(problem, padding_mask=problem.seen if padded else None)
    assert len(made) == described


def test_every_chip_has_tiles_for_every_head() -> None:
    for capability in (80, 86, 89, 90, 100, 103, 120, 121):
        kind = blocks.chip_class(capability)
        for described in (False, True) if kind in (90, 100) else (False,):
            for head_dim in range(1, 257):
                for tile in blocks.backward_blocks_for(head_dim, capability, described):
                    assert tile.head_dim >= head_dim and tile in sum(blocks.BACKWARD[kind, described], ())
