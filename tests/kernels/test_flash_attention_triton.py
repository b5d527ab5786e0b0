"""The forward pass in Triton's interpreter, by pointers and by descriptors, against the definition in float64.

Around the inputs lies NaN: one read too many shows. The interpreter multiplies float16 alone rightly.
"""

import itertools
import math
import mmap

import pytest
import torch
import triton
import triton.language as tl

from labkit.kernels import BackendUnavailable, choose_backend, flash_attention
from labkit.kernels.flash_attention import blocks, launch
from labkit.kernels.flash_attention.reference import flash_attention_reference
from labkit.kernels.flash_attention.triton import _place

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel")

NAN = float("nan")
SMALL = (16, 16)
POINTERS, DESCRIPTORS = False, True
FORMS = pytest.mark.parametrize("described", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])
CAUSAL = pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])


def guarded(*shape: int, size: float = 1.0) -> torch.Tensor:
    """Random float16 of `shape (batch, heads, length, width)`, with NaN behind each row, each head and each batch."""
    batch, heads, length, width = shape
    x = torch.full((batch + 1, heads + 1, length + 3, -(-width // 8) * 8 + 8), NAN, dtype=torch.float16)
    x[:batch, :heads, :length, :width] = size * torch.randn(shape)
    return x[:batch, :heads, :length, :width]


def inputs(q_len, kv_len=None, *, batch=1, heads=2, kv_heads=1, head_dim=32, size=1.0):
    kv_len = q_len if kv_len is None else kv_len
    q = guarded(batch, heads, q_len, head_dim, size=size)
    return q, *(guarded(batch, kv_heads, kv_len, head_dim, size=size) for _ in range(2))


def sees(q, k, causal: bool, keys: torch.Tensor | None) -> torch.Tensor:
    """Bool `(batch, 1, q_len, kv_len)`."""
    (q_len, kv_len), batch = (q.shape[2], k.shape[2]), q.shape[0]
    at = torch.arange(q_len)[:, None] + kv_len - q_len
    seen = (torch.arange(kv_len) <= at) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    keys = torch.ones(batch, kv_len, dtype=torch.bool) if keys is None else keys
    return seen & keys[:, None, None]


def plain(q, k, v, causal: bool, scale: float, keys: torch.Tensor | None) -> torch.Tensor:
    """The formula as PyTorch works it out in the inputs' own precision."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    seen = sees(q, k, causal, keys)
    weights = (q @ k.mT * scale).masked_fill(~seen, -math.inf).softmax(-1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0) @ v


def bounds_of(keys: torch.Tensor) -> torch.Tensor:
    rows = [row.nonzero().flatten().tolist() or [0, -1] for row in keys]
    return torch.tensor([[row[0], row[-1] + 1] for row in rows], dtype=torch.int32)


def check(x, causal, described, *, block_sizes=SMALL, keys=None, has_mask=False, scale=None) -> torch.Tensor:
    """At most twice the error of the same formula by PyTorch in float16; and the sums. Returns the output."""
    scale = x[0].shape[3] ** -0.5 if scale is None else scale
    bounds = None if keys is None else bounds_of(keys)
    out, lse = launch.forward(*x, causal, scale, bounds, keys if has_mask else None, block_sizes, described)
    expected = flash_attention_reference(*(t.double() for t in x), causal, scale, keys)
    assert out.shape == x[0].shape and out.dtype == torch.float16
    off = (plain(*x, causal, scale, keys).double() - expected).abs().max()
    assert (out.double() - expected).abs().max() <= 2 * off
    k = x[1].double().repeat_interleave(x[0].shape[1] // x[1].shape[1], dim=1)
    scores = (x[0].double() @ k.mT * scale).masked_fill(~sees(x[0], k, causal, keys), -math.inf)
    # In powers of two; what float32 keeps of the largest score.
    torch.testing.assert_close(lse.double() * math.log(2), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)
    return out


@FORMS
@CAUSAL
@pytest.mark.parametrize("length", [1, 15, 16, 17, 61, 63, 64, 65, 127])
def test_every_length(length: int, causal: bool, described: bool) -> None:
    check(inputs(length), causal, described, block_sizes=(32, 32))


@FORMS
@CAUSAL
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 47), (1, 64), (5, 83), (16, 48), (17, 16), (40, 23), (33, 34), (50, 1), (31, 97)]
)
def test_other_numbers_of_queries_than_of_keys(q_len: int, kv_len: int, causal: bool, described: bool) -> None:
    out = check(inputs(q_len, kv_len), causal, described)
    if causal and q_len > kv_len:
        assert out[:, :, : q_len - kv_len].eq(0).all() and not out[:, :, q_len - kv_len :].eq(0).all(-1).any()


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_number_of_query_heads_a_kv_head(each: int) -> None:
    for kv_heads in (1, 2):
        x = inputs(9, batch=1 + each % 2, heads=each * kv_heads, kv_heads=kv_heads, head_dim=16)
        check(x, True, (each // 2 + kv_heads) % 2 == 1)


@FORMS
@pytest.mark.parametrize("head_dim", [1, 8, 16, 24, 32, 64, 72, 80, 96, 100, 128, 160, 192, 256])
def test_every_size_of_head(head_dim: int, described: bool) -> None:
    check(inputs(35, head_dim=head_dim), True, described)
    check(inputs(3, 18, head_dim=head_dim), False, described)


@FORMS
@pytest.mark.parametrize("block_sizes", list(itertools.product((16, 32, 64), (16, 32, 128))))
def test_every_size_of_tile(block_sizes: tuple[int, int], described: bool) -> None:
    check(inputs(70, 75, head_dim=16, heads=1), sum(block_sizes) % 3 > 0, described, block_sizes=block_sizes)


@FORMS
def test_the_sizes_of_the_table(described: bool) -> None:
    check(inputs(150, heads=1, head_dim=64), True, described, block_sizes=None)


@FORMS
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_any_order_of_dimensions_in_memory(order: tuple[int, ...], described: bool) -> None:
    """As models have them: `(batch, length, heads, head_dim)`; and with channels apart, which are put together."""
    back = tuple(order.index(i) for i in range(4))
    x = [t.permute(order).contiguous().permute(back) for t in inputs(21, 26, batch=2, heads=4, kv_heads=2)]
    out = check(x, True, described)
    assert out.stride(3) == 1
    if order[3] == 3:
        assert out.stride() == x[0].stride()


def test_rows_that_are_one_in_memory() -> None:
    q, k, v = inputs(20, batch=2, heads=2, kv_heads=1)
    check((q, k[:1].expand_as(k), v[:, :, :1].expand_as(v)), True, POINTERS)
    assert not launch.can_describe(k[:1].expand_as(k))


def test_what_lies_far_apart() -> None:
    """Offsets past 2^31, of rows, of heads and of batches: address space that is mapped, and hardly touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    room = torch.frombuffer(mmap.mmap(-1, 6 * 2**31, flags=flags), dtype=torch.float16)
    q, k, v = inputs(33, head_dim=16, heads=3, kv_heads=3)
    rows = room.as_strided(k.shape, (0, 64, 2**26 + 64, 1), 2**10).copy_(k)
    heads = room.as_strided(k.shape, (0, 2**30 + 64, 32, 1), 2**20).copy_(v)
    check((q, rows, heads), True, POINTERS)
    check((rows, heads, k), False, POINTERS)
    batches = room.as_strided((3, 2, 33, 16), (2**30 + 64, 16 * 40, 16, 1), 2**21).copy_(
        inputs(33, batch=3)[0][..., :16]
    )
    check((batches, batches, batches), True, POINTERS)


PADDINGS = {
    "right": lambda j, b: j < 41 - 9 * b,
    "left": lambda j, b: j >= 5 + 21 * b,
    "both": lambda j, b: (j >= 3 + 15 * b) & (j < 30),
    "holes": lambda j, b: (j * (3 + b)) % 7 < 3,
    "one": lambda j, b: j == 17 + b,
    "nothing in a row": lambda j, b: (j >= 0) & (b != 1),
}


def padding(name: str, batch: int, length: int) -> torch.Tensor:
    return torch.stack([PADDINGS[name](torch.arange(length), b) for b in range(batch)])


@CAUSAL
@pytest.mark.parametrize("name", PADDINGS)
def test_padding_anywhere(name: str, causal: bool) -> None:
    keys = padding(name, 3, 50)
    x = inputs(37, 50, batch=3)
    for t in x[1:]:
        t.masked_fill_(~keys[:, None, :, None], 3.0)
    out = check(x, causal, POINTERS, keys=keys, has_mask=True)
    blind = ~sees(x[0], x[1], causal, keys).any(-1)
    assert out.masked_select(blind[..., None]).eq(0).all()
    if name == "nothing in a row":
        assert blind.any()


@FORMS
@CAUSAL
@pytest.mark.parametrize("name", [name for name in PADDINGS if name != "holes"])
def test_bounds_alone(name: str, causal: bool, described: bool) -> None:
    """No hole: the first key and one past the last say it all."""
    check(inputs(50, batch=3), causal, described, keys=padding(name, 3, 50))


@FORMS
def test_nothing_outside_the_bounds_gets_in(described: bool) -> None:
    """What a cache holds behind the last key may be anything."""
    keys, x = padding("both", 2, 50), inputs(50, batch=2)
    garbled = [x[0], *(t.clone().masked_fill_(~keys[:, None, :, None], NAN) for t in x[1:])]
    scale = 32**-0.5
    for causal in (True, False):
        want, got = (launch.forward(*y, causal, scale, bounds_of(keys), None, SMALL, described) for y in (x, garbled))
        assert torch.equal(want[0], got[0]) and torch.equal(want[1], got[1])


def test_nothing_in_a_hole_gets_in() -> None:
    keys, x = padding("holes", 2, 50), inputs(50, batch=2)
    garbled = [x[0], *(t.clone().masked_fill_(~keys[:, None, :, None], NAN) for t in x[1:])]
    for causal in (True, False):
        want, got = (launch.forward(*y, causal, 0.2, bounds_of(keys), keys, SMALL)[0] for y in (x, garbled))
        assert torch.equal(want, got)


@FORMS
@pytest.mark.parametrize(
    ("size", "scale"), [(60.0, 1.0), (200.0, 0.18), (1e-3, 0.18), (1.0, 1e-6), (3.0, -0.3), (2, 0)]
)
def test_scores_of_any_size(size: float, scale: float, described: bool) -> None:
    x = inputs(40, 45, size=size)
    scores = x[0].double() @ x[1].double().mT * scale
    assert (size < 50) == (scores.abs().max() < 1000)
    for causal in (True, False):
        # What PyTorch's own overflows on in float16, it gets as numbers that float32 made.
        own = plain(*x, causal, scale, None)
        if own.isfinite().all():
            check(x, causal, described, scale=scale)
        out = launch.forward(*x, causal, scale, None, None, SMALL, described)[0].double()
        expected = flash_attention_reference(*(t.double() for t in x), causal, scale)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=1e-3 * size)


@FORMS
def test_a_largest_score_that_comes_late_or_early(described: bool) -> None:
    for at in (0, 20, 44):
        x = inputs(45)
        x[1][:, :, at] = 8 * x[0][:, :1, 30]
        check(x, False, described)


def test_both_forms_give_the_same_bits_every_time_in_whatever_order(monkeypatch: pytest.MonkeyPatch) -> None:
    x, keys = inputs(40, 50, batch=2, heads=4, kv_heads=2), padding("both", 2, 50)
    for causal in (True, False):
        results = []
        for described, together in ((POINTERS, 4), (POINTERS, 3), (DESCRIPTORS, 1), (DESCRIPTORS, 12)):
            monkeypatch.setattr(launch, "heads_together", lambda k, each, n=together: n)
            results.append(launch.forward(*x, causal, 0.2, bounds_of(keys), None, SMALL, described))
        assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


@triton.jit
def _placed(out_ptr, blocks_each, all_heads, together, causal: tl.constexpr):
    block, head = _place(tl.program_id(0), blocks_each, all_heads, together, causal)
    tl.store(out_ptr + 2 * tl.program_id(0), head // together)
    tl.store(out_ptr + 2 * tl.program_id(0) + 1, block * 100 + head)


@CAUSAL
@pytest.mark.parametrize("together", [1, 4, 5, 50])
def test_the_longest_blocks_of_heads_that_are_together_run_first(together: int, causal: bool) -> None:
    order = torch.zeros(7 * 12, 2, dtype=torch.int32)
    _placed[(7 * 12,)](order, 7, 12, together, causal)
    groups, blocks_of = order[:, 0].tolist(), [(int(n) // 100, int(n) % 100) for n in order[:, 1]]
    assert sorted(blocks_of) == list(itertools.product(range(7), range(12)))
    assert groups == sorted(groups)
    for group in set(groups):
        inside = [block for block, head in blocks_of if head // together == group]
        assert inside == sorted(inside, reverse=causal)


def test_heads_that_fit_into_the_cache_run_beside_each_other() -> None:
    k = torch.empty(1, 2, 4096, 128, dtype=torch.float16)
    # 2 MiB of K and V a KV head, of the 2 MiB that may be filled.
    assert launch.heads_together(k, 4) == 4
    four = torch.empty(2, 2, 1024, 128, dtype=torch.float16)
    assert launch.heads_together(four, 4) == 16
    assert launch.heads_together(four[:1], 4) == 8  # no more than there are
    assert launch.heads_together(k.repeat(1, 1, 8, 1), 4) == 4


def test_a_row_in_place_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, launched = [], launch._launch
    monkeypatch.setattr(launch, "_launch", lambda *x: (rows.append(x[-1]), launched(*x)))
    x, row = inputs(40), blocks.Blocks(32, 32, 16, 4, 3, described=True)
    out = launch.forward(*x, True, 0.2, None, None, None, blocks=row)[0]
    assert rows == [row] and torch.equal(out, launch.forward(*x, True, 0.2, None, None, (32, 16), True)[0])


@pytest.mark.parametrize(("batch", "q_len", "kv_len"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_nothing_to_do(batch: int, q_len: int, kv_len: int) -> None:
    q, k = torch.randn(batch, 2, q_len, 16).half(), torch.randn(batch, 1, kv_len, 16).half()
    out, lse = launch.forward(q, k, k, True, 0.25, None, None, None)
    assert out.shape == q.shape and out.eq(0).all()
    assert lse.shape == q.shape[:3] and lse.eq(-math.inf).all()


def test_as_a_backend_of_the_op() -> None:
    q, k, v = (t.contiguous() for t in inputs(40, batch=2, heads=4, kv_heads=2))
    mask, seqlens = padding("holes", 2, 40), torch.tensor([40, 23], dtype=torch.int32)
    options = {"causal": True, "padding_mask": mask, "seqlens_k": seqlens}
    got = flash_attention(q, k, v, backend="triton", block_sizes=(32, 16), **options)
    keys = mask & (torch.arange(40) < seqlens[:, None])
    assert torch.equal(got, launch.forward(q, k, v, True, 32**-0.5, bounds_of(keys), keys, (32, 16))[0])
    torch.testing.assert_close(got, flash_attention(q, k, v, backend="reference", **options), rtol=0, atol=3e-3)


def test_what_it_does_not_take() -> None:
    q, k, v = inputs(4)
    assert launch.why_not(q, k, v) is None and launch.why_not(q, k, v, (16, 256)) is None
    single = [t.float() for t in (q, k, v)]
    assert "float16" in launch.why_not(*single) and "float32" in launch.why_not(*single)
    assert "up to 256" in launch.why_not(*inputs(1, head_dim=264))
    for sizes in ((48, 16), (16, 8), (512, 16)):
        assert "powers of two" in launch.why_not(q, k, v, sizes)
        with pytest.raises(BackendUnavailable, match="powers of two"):
            flash_attention(q, k, v, causal=True, block_sizes=sizes, backend="triton")
    assert "shared memory" in launch.why_not(*inputs(1, head_dim=256), (256, 256))
    assert choose_backend("flash_attention", q, k, v).name != "triton"


def test_gradients_reach_each_input_and_once_only() -> None:
    """The wiring; what the backward pass works out has tests of its own."""
    x = [t.contiguous().requires_grad_() for t in inputs(20, 24, batch=2, heads=4, kv_heads=2)]
    keys = padding("both", 2, 24)
    out = launch.attend(*x, True, -0.3, bounds_of(keys), None, SMALL)
    with torch.no_grad():
        assert torch.equal(out, launch.attend(*x, True, -0.3, bounds_of(keys), None, SMALL))
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, x, dout, create_graph=True)
    wide = [t.detach().double().requires_grad_() for t in x]
    want = torch.autograd.grad(flash_attention_reference(*wide, True, -0.3, keys), wide, dout.double())
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()
    with pytest.raises(RuntimeError, match="flash_attention is differentiable once"):
        got[0].sum().backward()


def test_kept_for_the_backward_pass_is_nothing_that_grows_with_the_square() -> None:
    x = [t.contiguous().requires_grad_() for t in inputs(33, heads=4, kv_heads=2)]
    out = launch.attend(*x, True, 0.2, None, None, SMALL)
    *kept, bounds, mask = out.grad_fn.saved_tensors
    assert bounds is None and mask is None
    assert [t.shape for t in kept] == [*(t.shape for t in x), out.shape, out.shape[:3]]
    assert [t.data_ptr() for t in kept[:4]] == [t.data_ptr() for t in (*x, out)]
    with torch.no_grad():
        assert launch.attend(*x, True, 0.2, None, None, SMALL).grad_fn is None


def test_a_mask_that_is_changed_before_the_backward_pass_is_told() -> None:
    """Gradients of another mask than the output's would be wrong without a word."""
    x = [t.requires_grad_() for t in inputs(33, heads=4, kv_heads=2)]
    mask = torch.rand(x[0].shape[0], x[1].shape[2]) > 0.3
    for backend in ("triton", "tiled"):
        out = flash_attention(*x, causal=True, padding_mask=mask, backend=backend)
        mask.fill_(True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("capability", [80, 86, 87, 89, 90, 100, 103, 110, 120])
def test_each_head_and_chip_has_a_row_of_the_table(capability: int) -> None:
    most = blocks.SHARED_BYTES[blocks.chip_class(capability)]
    for head_dim, described in itertools.product((1, 16, 64, 80, 128, 129, 256), (POINTERS, DESCRIPTORS)):
        found = blocks.blocks_for(head_dim, capability, described)
        assert found.head_dim >= head_dim
        assert found.described == (described and capability // 10 in (9, 10))
        assert blocks.shared_bytes(head_dim, found.block_q, found.block_k, found.num_stages) <= most
        for sizes in ((16, 16), (256, 16), (64, 128), (128, 64)):
            other = found.resized(*sizes, capability)
            assert (other.block_q, other.block_k, other.described) == (*sizes, found.described)
            assert other.num_stages == 1 or blocks.shared_bytes(256, *sizes, 2) <= most or head_dim < 129
    assert blocks.blocks_for(256, capability, False).resized(64, 256, capability).num_stages == 1
