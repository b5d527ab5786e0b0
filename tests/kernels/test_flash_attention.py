"""flash_attention in PyTorch (native, tiled, reference) against the definition in float64, forward and backward."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.kernels import BackendUnavailable, choose_backend, flash_attention, why_no_triton
from labkit.kernels.flash_attention.tiled import attend_tile, empty_state, finish, tiled_forward
from labkit.kernels.flash_attention.tiles import tiles
from labkit.measure import peak_memory

ON_CPU = ("torch", "tiled", "reference")
LENGTHS = [1, 63, 64, 65, 127, 131]
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def inputs(q_len, kv_len=None, *, batch=2, heads=4, kv_heads=2, head_dim=16, dtype=torch.float64, large=1.0):
    kv_len = q_len if kv_len is None else kv_len
    shapes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    return tuple((large * torch.randn(batch, h, n, head_dim)).to(dtype).requires_grad_() for h, n in shapes)


def definition(q, k, v, *, causal, seqlens_k=None, padding_mask=None, softmax_scale=None):
    """One query at a time, over the list of keys that it sees."""
    q, k, v = (x.double() for x in (q, k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    rows = []
    for b, h, i in ((b, h, i) for b in range(q.shape[0]) for h in range(q.shape[1]) for i in range(q.shape[2])):
        shared = h // (q.shape[1] // k.shape[1])
        seen = [
            j
            for j in range(k.shape[2])
            if (not causal or j <= i + k.shape[2] - q.shape[2])
            and (seqlens_k is None or j < seqlens_k[b])
            and (padding_mask is None or padding_mask[b, j])
        ]
        weights = torch.softmax(k[b, shared, seen] @ q[b, h, i] * scale, dim=0)
        rows.append(weights @ v[b, shared, seen])
    return torch.stack(rows).view(q.shape) if rows else q.clone()


def gradients(out, x, dout):
    given = torch.autograd.grad(out, x, dout, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(x, given, strict=True)]


def check(x, *, blocks=(16, 32), **options) -> None:
    """All backends give the definition's output and gradients, finite everywhere."""
    expected = definition(*x, **options)
    dout = torch.randn(x[0].shape, dtype=torch.float64)
    wanted = gradients(expected, x, dout)
    for backend in ON_CPU:
        out = flash_attention(*x, backend=backend, block_sizes=blocks if backend == "tiled" else None, **options)
        assert out.shape == x[0].shape and out.dtype == x[0].dtype
        torch.testing.assert_close(out, expected, **EXACT)
        for name, got, want in zip("qkv", gradients(out, x, dout), wanted, strict=True):
            torch.testing.assert_close(got, want, **EXACT, msg=lambda m, n=name, b=backend: f"d{n} of {b}: {m}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_a_block_and_primes(length: int, causal: bool) -> None:
    check(inputs(length, batch=1), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 67), (3, 64), (33, 70), (64, 65), (70, 33), (5, 1), (7, 0)])
def test_other_numbers_of_queries_than_keys(q_len: int, kv_len: int, causal: bool) -> None:
    """Causal masks are aligned to the end; with more queries than keys the first see nothing."""
    check(inputs(q_len, kv_len, batch=1), causal=causal)


def test_more_queries_than_a_chunk_of_the_native_kernel() -> None:
    x = inputs(300, 333, batch=1, heads=1, kv_heads=1, head_dim=8)
    got = flash_attention(*x, causal=True, backend="torch")
    torch.testing.assert_close(got, flash_attention(*x, causal=True, backend="reference"), **EXACT)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 3), (6, 2), (6, 1), (4, 2), (8, 1)])
def test_every_number_of_query_heads_a_kv_head(heads: int, kv_heads: int) -> None:
    check(inputs(33, heads=heads, kv_heads=kv_heads), causal=True)


@pytest.mark.parametrize("head_dim", [1, 8, 32, 80, 96, 100, 256])
def test_every_size_of_head(head_dim: int) -> None:
    check(inputs(19, 25, batch=1, heads=2, kv_heads=1, head_dim=head_dim), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["left", "right", "holes", "all", "none"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(34, 34), (9, 34), (34, 9), (1, 34)])
def test_padding_masks(q_len: int, kv_len: int, side: str, causal: bool) -> None:
    """A query that sees nothing gives zeros, and zero gradients, in every backend."""
    padding = torch.ones(3, kv_len, dtype=torch.bool)
    if side == "left":
        padding[0, :5], padding[1, : kv_len - 1] = False, False
    elif side == "right":
        padding[0, 5:], padding[1, 1:] = False, False
    elif side == "holes":
        padding = torch.rand(3, kv_len) > 0.5
    elif side == "all":
        padding[1] = False
    check(inputs(q_len, kv_len, batch=3, heads=2, kv_heads=1, head_dim=8), causal=causal, padding_mask=padding)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_different_lengths(dtype: torch.dtype, causal: bool) -> None:
    lengths = torch.tensor([40, 17, 0, 1], dtype=dtype)
    x = inputs(40, batch=4, heads=2, kv_heads=1, head_dim=8)
    check(x, causal=causal, seqlens_k=lengths)
    # Both together: a key has to be allowed by each.
    check(x, causal=causal, seqlens_k=lengths, padding_mask=torch.rand(4, 40) > 0.3)


@pytest.mark.parametrize("large", [1e-4, 30.0])
def test_very_small_and_very_large_scores(large: float) -> None:
    """Scores of a thousand: their exponentials overflow unless the maximum comes off first."""
    check(inputs(40, large=large), causal=True)


def test_scales_and_blocks_of_any_size() -> None:
    x = inputs(37, 41, batch=1)
    for scale in (0.0, 2.5, -0.3):
        check(x, causal=True, softmax_scale=scale)
    for blocks in ((1, 1), (5, 7), (64, 3), (3, 64), (1000, 1000)):
        check(x, causal=True, blocks=blocks)


def test_strides_of_any_kind() -> None:
    """What a model hands over: heads and tokens swapped, a slice of a longer cache, a channel axis that is not last."""
    q = torch.randn(2, 20, 4, 16, dtype=torch.float64).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 2, 50, 16, dtype=torch.float64)[:, :, 5:29].requires_grad_()
    v = torch.randn(2, 2, 16, 24, dtype=torch.float64).mT.requires_grad_()
    check((q, k, v), causal=True)
    one = torch.randn(1, 2, 24, 16, dtype=torch.float64).expand(2, -1, -1, -1).requires_grad_()
    check((q, one, v), causal=True, padding_mask=torch.rand(2, 24) > 0.3)


@pytest.mark.parametrize("sizes", [(2, 4, 0, 9), (0, 4, 5, 5), (2, 4, 5, 0)])
@pytest.mark.parametrize("backend", ON_CPU)
def test_empty(sizes: tuple[int, ...], backend: str) -> None:
    batch, heads, q_len, kv_len = sizes
    x = inputs(q_len, kv_len, batch=batch, heads=heads)
    for options in ({}, {"seqlens_k": torch.zeros(batch, dtype=torch.int32)}):
        out = flash_attention(*x, causal=True, backend=backend, **options)
        assert out.shape == (batch, heads, q_len, 16) and not out.any()
        assert all(g is not None and not g.any() for g in torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_low_precision_is_within_twice_pytorchs_own(dtype: torch.dtype, causal: bool) -> None:
    """Output and gradients, against float64; PyTorch's own: the formula step by step in the same dtype."""
    x = inputs(130, dtype=dtype)
    wide = [a.detach().double().requires_grad_() for a in x]
    dout = torch.randn_like(x[0])
    options = {"causal": causal, "padding_mask": torch.rand(2, 130) > 0.2}
    expected = definition(*wide, **options)
    wanted = [expected, *gradients(expected, wide, dout.double())]

    def off(out):
        return [(a.double() - b).norm() for a, b in zip([out, *gradients(out, x, dout)], wanted, strict=True)]

    sees = torch.ones(130, 130, dtype=torch.bool).tril(0 if causal else 130) & options["padding_mask"][:, None, None]
    scores = (x[0] @ x[1].repeat_interleave(2, 1).mT / math.sqrt(16)).masked_fill(~sees, -torch.inf)
    blind = ~sees.any(-1, keepdim=True)
    own = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ x[2].repeat_interleave(2, 1)
    allowed_by = off(own)
    # Triton's interpreter multiplies float16 alone rightly.
    interpreted = dtype is torch.float16 and why_no_triton(x[0].device) is None
    for backend in (*ON_CPU, "triton") if interpreted else ON_CPU:
        out = flash_attention(*x, backend=backend, **options)
        assert out.dtype is dtype
        for got, allowed in zip(off(out), allowed_by, strict=True):
            assert got <= 2 * allowed


def test_gradcheck_of_the_tiles() -> None:
    x = inputs(7, 9, batch=1, heads=2, kv_heads=1, head_dim=3)
    padding = torch.tensor([[False, True, True, False, True, True, True, True, False]])
    for causal in (False, True):
        options = {"causal": causal, "padding_mask": padding, "block_sizes": (3, 4), "backend": "tiled"}
        assert torch.autograd.gradcheck(lambda *a, o=options: flash_attention(*a, **o), x)


def test_statistics_are_those_of_logsumexp() -> None:
    """What the forward pass hands to the backward pass: the logarithm of each row's sum of exponentials."""
    q, k, v = (a.detach() for a in inputs(20, 26, kv_heads=4))
    _, lse = tiled_forward(q, k, v, True, 0.25, None, (8, 8))
    sees = torch.ones(20, 26, dtype=torch.bool).tril(6)
    torch.testing.assert_close(lse, (q @ k.mT * 0.25).masked_fill(~sees, -torch.inf).logsumexp(-1), **EXACT)
    _, lse = tiled_forward(q, k, v, False, 0.25, torch.zeros(2, 26, dtype=torch.bool))
    assert (lse == -torch.inf).all()


def test_a_step_of_the_online_softmax_gives_the_softmax_over_what_was_seen() -> None:
    scores, values = 50 * torch.randn(3, 5, 12, dtype=torch.float64), torch.randn(3, 12, 4, dtype=torch.float64)
    scores[1, 2, :9] = -torch.inf
    state = empty_state(torch.zeros(3, 5, 4, dtype=torch.float64))
    for stop in (4, 8, 12):
        state = attend_tile(state, scores[..., stop - 4 : stop], values[:, stop - 4 : stop])
        out, lse = finish(state)
        weights = scores[..., :stop].softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(out, weights @ values[:, :stop], **EXACT)
        torch.testing.assert_close(lse, scores[..., :stop].logsumexp(-1), **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(10, 10, (3, 4)), (4, 11, (2, 8)), (11, 4, (4, 4)), (1, 1, (16, 16)), (6, 0, (2, 2))]
)
def test_tiles_cover_every_pair_that_is_seen_once_and_no_tile_for_nothing(sizes: tuple, causal: bool) -> None:
    q_len, kv_len, blocks = sizes
    sees = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len if causal else q_len + kv_len)
    visits = torch.zeros(q_len, kv_len, dtype=torch.int)
    for tile in tiles(q_len, kv_len, blocks, causal):
        at = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        visits[at] += 1
        assert sees[at].any() and tile.partial == (not sees[at].all())
        assert visits[at].numel() <= blocks[0] * blocks[1]
    assert ((visits == 1) | ~sees).all() and (visits <= 1).all()


class _Largest(TorchDispatchMode):
    """The most elements that any result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                # Of an expanded tensor only what is stored.
                self.elements = max(self.elements, min(x.numel(), x.untyped_storage().nbytes() // x.element_size()))
        return out


@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "padded"), [(1024, False), (1024, True), (1000, False)])
def test_nothing_is_as_large_as_the_matrix(backend: str, q_len: int, padded: bool, causal: bool) -> None:
    """Forward and backward: nothing beyond 256 rows of scores, K, V and the output."""
    x = inputs(q_len, 1024, batch=1, heads=2, kv_heads=1, dtype=torch.float32)
    padding = torch.ones(1, 1024, dtype=torch.bool)
    padding[0, :3] = not padded
    with _Largest() as largest:
        out = flash_attention(*x, causal=causal, padding_mask=padding if padded else None, backend=backend)
        out.sum().backward()
    assert 0 < largest.elements <= 2 * 256 * 1024


@pytest.mark.parametrize("backend", ["torch", "tiled"])
@pytest.mark.parametrize("backward", [False, True])
def test_extra_memory_doubles_with_the_length(backend: str, backward: bool) -> None:
    """By the allocator, over four doublings: what is added about doubles each time. The definition's grows fourfold."""

    def peak(backend: str, length: int) -> int:
        x = inputs(length, batch=1, heads=1, kv_heads=1, head_dim=32, dtype=torch.float32)
        once = (lambda: run().sum().backward()) if backward else (lambda: run().detach())

        def run() -> torch.Tensor:
            return flash_attention(*x, causal=True, backend=backend)

        return peak_memory(once, device="cpu")

    # PyTorch's kernel takes larger blocks up to 1024.
    peaks = [peak(backend, (1024 if backend == "torch" else 256) << i) for i in range(5)]
    added = [b - a for a, b in itertools.pairwise(peaks)]
    assert all(1.5 * a < b < 2.6 * a for a, b in itertools.pairwise(added)), peaks
    matrix = [peak("reference", length) for length in (512, 1024)]
    assert matrix[1] > 3.5 * matrix[0] and matrix[1] > 4 * peak(backend, 1024)


@pytest.mark.parametrize("backend", ON_CPU)
def test_what_lies_in_padding_never_gets_in(backend: str) -> None:
    """NaN as well, as memory that nobody has written holds it: behind the lengths, and in holes."""
    for options in ({"seqlens_k": torch.tensor([9, 0])}, {"padding_mask": torch.rand(2, 20) > 0.4}):
        q, k, v = inputs(20)
        lengths = options.get("seqlens_k", torch.full((2,), 20))
        keys = (torch.arange(20) < lengths[:, None]) & options.get("padding_mask", torch.ones(2, 20, dtype=torch.bool))
        dirty = [x.detach().masked_fill(~keys[:, None, :, None], math.nan).requires_grad_() for x in (k, v)]
        clean, soiled = (flash_attention(q, *x, causal=True, backend=backend, **options) for x in ((k, v), dirty))
        assert torch.equal(clean, soiled)
        dout = torch.randn_like(q)
        for a, b in zip(gradients(clean, (q, k, v), dout), gradients(soiled, (q, *dirty), dout), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ON_CPU)
def test_tokens_that_overlap(backend: str) -> None:
    """Windows over one long row, whose tokens share channels."""
    x = [torch.randn(3000, dtype=torch.float64).as_strided((2, h, 20, 16), (7, 100, 3, 1)) for h in (4, 2, 2)]
    torch.testing.assert_close(flash_attention(*x, causal=True, backend=backend), definition(*x, causal=True), **EXACT)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_autocast_changes_nothing(backend: str) -> None:
    x = inputs(20, dtype=torch.float32)
    plain = flash_attention(*x, causal=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        cast = flash_attention(*x, causal=True, backend=backend)
        both = [gradients(out, x, torch.ones_like(out)) for out in (plain, cast)]
    assert torch.equal(plain, cast) and all(torch.equal(a, b) for a, b in zip(*both, strict=True))


def test_a_second_derivative_is_refused_and_not_lost() -> None:
    q, k, v = inputs(9)
    out = flash_attention(q, k, v, causal=True, backend="tiled")
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention is differentiable once"):
        (out.sum() + gradient.square().sum()).backward()
    out = flash_attention(q, k, v, causal=True, backend="reference")
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    gradient.square().sum().backward()
    assert q.grad.abs().sum() > 0


@pytest.mark.parametrize("backend", ON_CPU)
def test_the_same_bits_every_time(backend: str) -> None:
    x = inputs(200, dtype=torch.float32)
    runs = []
    for _ in range(3):
        out = flash_attention(*x, causal=True, backend=backend)
        runs.append([out, *gradients(out, x, torch.ones_like(out))])
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def test_choice_of_a_backend() -> None:
    x = inputs(8, dtype=torch.float32)
    choice = choose_backend("flash_attention", *x)
    assert choice.name == "torch" and "Triton" in choice.reason
    torch.testing.assert_close(flash_attention(*x, causal=True), flash_attention(*x, causal=True, backend="torch"))
    # Block sizes are the tiles' own.
    by_tiles = flash_attention(*x, causal=True, block_sizes=[3, 5])
    assert torch.equal(by_tiles, flash_attention(*x, causal=True, block_sizes=(3, 5), backend="tiled"))
    for backend in ("torch", "reference"):
        with pytest.raises(BackendUnavailable, match="takes no block_sizes; 'triton' and 'tiled' do"):
            flash_attention(*x, causal=True, block_sizes=(16, 16), backend=backend)


@pytest.mark.skipif(why_no_triton(torch.device("cpu")) is not None, reason="Triton's interpreter is off")
def test_the_triton_kernel_says_what_it_does_not_take() -> None:
    refused = {
        "it takes float16 alone in Triton's interpreter, and q is float32": ({"dtype": torch.float32}, None),
        "it takes heads of up to 256, and these have 264": ({"dtype": torch.float16, "head_dim": 264}, None),
        r"its block sizes are powers of two from 16 to 256, and these are \(48, 16\)": (
            {"dtype": torch.float16},
            (48, 16),
        ),
    }
    for message, (options, blocks) in refused.items():
        with pytest.raises(BackendUnavailable, match=f"backend 'triton' cannot run: {message}"):
            flash_attention(*inputs(8, **options), causal=True, backend="triton", block_sizes=blocks)


def test_what_does_not_fit_together_is_refused() -> None:
    q, k, v = inputs(8, dtype=torch.float32)
    refused = {
        "q: got 'torch.int64'; takes torch.bfloat16": (q.long(), k, v, {}),
        "q: got .*; takes 4 dimensions": (q[0], k, v, {}),
        "q: got .*; takes a head_dim of at least 1": (q[..., :0], k[..., :0], v[..., :0], {}),
        "k: got 'torch.float64'; takes torch.float32": (q, k.double(), v, {}),
        r"k: got 'shape \(2, 3, 8, 16\)'; takes .* divides q's 4 heads": (q, k[:, :1].expand(-1, 3, -1, -1), v, {}),
        r"k: got 'shape \(1, 2, 8, 16\)'": (q, k[:1], v, {}),
        r"v: got 'shape \(2, 2, 7, 16\)'; takes k's": (q, k, v[:, :, :7], {}),
        "causal: got 1; takes True or False": (q, k, v, {"causal": 1}),
        "softmax_scale: got nan": (q, k, v, {"softmax_scale": math.nan}),
        "seqlens_k: got '1 rows'; takes 2": (q, k, v, {"seqlens_k": torch.tensor([8])}),
        "seqlens_k: got .*; takes numbers of keys from 0 to 8": (q, k, v, {"seqlens_k": torch.tensor([8, 9])}),
        "seqlens_k: got 'torch.float32'": (q, k, v, {"seqlens_k": torch.ones(2)}),
        "padding_mask: got 'torch.int64'; takes torch.bool": (q, k, v, {"padding_mask": torch.ones(2, 8).long()}),
        r"padding_mask: got 'shape \(2, 7\)'; takes \(batch, kv_len\), \(2, 8\)": (
            *(q, k, v),
            {"padding_mask": torch.ones(2, 7).bool()},
        ),
        "block_sizes: got 16; takes": (q, k, v, {"block_sizes": 16}),
        "block_sizes: got 0; takes an integer of at least 1": (q, k, v, {"block_sizes": (16, 0)}),
        "backend: got 'cuda'; takes one of auto, triton, torch, tiled, reference": (q, k, v, {"backend": "cuda"}),
    }
    for message, (*x, options) in refused.items():
        with pytest.raises(ValueError, match=message):
            flash_attention(*x, **{"causal": True, **options})
