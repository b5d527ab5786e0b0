"""decode_attention in PyTorch and its reference, against the definition in float64; NaN lies around every cache."""

import dataclasses

import pytest
import torch

from labkit.kernels import BackendUnavailable, choose_backend, decode_attention, kv_quantize
from labkit.kernels.decode_attention import chunked
from tests.kernels.caches import Cache, exact, make, plain, random_tree

ROWS = [130, 7, 0, 64]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 127, 131]
# The wide sums of float32, and of what was rounded to it.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def check(cache: Cache, **options: object) -> None:
    expected = exact(cache, options.get("tree_mask"))
    for backend in ("torch", "reference"):
        got = cache.attend(backend=backend, **options)
        assert got.shape == cache.q.shape and got.dtype == cache.q.dtype
        torch.testing.assert_close(got.double(), expected, **CLOSE)


@pytest.mark.parametrize("block_size", [0, 16, 48])
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_dense_rows_of_every_length(length: int, q_len: int, block_size: int) -> None:
    check(make([length, max(0, length - 5), length], block_size=block_size, q_len=q_len))


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_number_of_query_heads_a_kv_head(each: int, kv_heads: int) -> None:
    for lengths in (ROWS, [70, 70]):  # the second is PyTorch's own kernel
        check(make(lengths, heads=each * kv_heads, kv_heads=kv_heads, q_len=2, head_dim=32))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("recent", [0, 9])
@pytest.mark.parametrize("block_size", [0, 16, 64])
@pytest.mark.parametrize("q_len", [1, 4])
def test_codes_with_and_without_a_recent_part(bits: int, recent: int, block_size: int, q_len: int) -> None:
    check(make(ROWS, bits=bits, recent=recent, block_size=block_size, q_len=q_len))


@pytest.mark.parametrize(("group", "v_group"), [(16, 64), (32, 16), (64, 4), (24, 8), (136, 32), (1, 1)])
def test_groups_of_any_size(group: int, v_group: int) -> None:
    """Smaller than a chunk, larger, and no power of two."""
    for head_dim in (64, 128):
        check(make([120, 100, 3], bits=4, v_bits=8, group=group, v_group=v_group, head_dim=head_dim, recent=4))


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [16, 4])
def test_every_size_of_head(head_dim: int, bits: int) -> None:
    check(make(ROWS, head_dim=head_dim, bits=bits))


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_keys_by_token_and_values_by_channel(axis: str) -> None:
    cache = make([64, 40])
    k, v = (
        kv_quantize(x.nan_to_num(0.0), bits=8, group_size=16, axis=a)
        for x, a in ((cache.k, axis), (cache.v, "channel"))
    )
    check(dataclasses.replace(cache, k=k, v=v, dense=(k.dequantize(torch.float64), v.dequantize(torch.float64))))


@pytest.mark.parametrize("q_len", [1, 2, 7, 20])
@pytest.mark.parametrize("options", [{}, {"block_size": 16}, {"bits": 4, "recent": 5}, {"bits": 4, "recent": 30}])
def test_tree_masks(q_len: int, options: dict) -> None:
    """New tokens in the recent part, or some of them in codes already; rows shorter than the draft."""
    tree = random_tree(q_len)
    check(make([90, q_len, max(0, q_len - 1), 33], q_len=q_len, **options), tree_mask=tree)
    # A chain is the causal mask.
    cache = make([90, 40], q_len=q_len, **options)
    chain = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    torch.testing.assert_close(cache.attend(tree_mask=chain), cache.attend(), **CLOSE)


@pytest.mark.parametrize("length", range(60, 70))
@pytest.mark.parametrize("options", [{"block_size": 16}, {"bits": 4, "recent": 5}, {"bits": 8, "group": 32}])
def test_new_tokens_where_a_chunk_ends(length: int, options: dict) -> None:
    """A row alone, so that nothing else calls for a mask: its queries see all of a chunk, or not quite."""
    for q_len in (1, 2, 3):
        cache = make([length], q_len=q_len, **options)
        check(cache)
        check(cache, tree_mask=torch.eye(q_len, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [16, 8, 2])
@pytest.mark.parametrize("lengths", [ROWS, [100, 100]])
def test_it_errs_at_most_twice_as_much_as_the_same_formula(dtype: torch.dtype, bits: int, lengths: list) -> None:
    cache = make(lengths, dtype=dtype, bits=bits, q_len=3, block_size=16 if bits < 16 else 0)
    expected = exact(cache)
    off = (plain(cache).double() - expected).abs().max()
    for backend in ("torch", "reference"):
        assert (cache.attend(backend=backend).double() - expected).abs().max() <= 2 * off


@pytest.mark.parametrize("options", [{}, {"bits": 4, "recent": 6}, {"bits": 2}])
def test_a_permuted_block_table_changes_nothing(options: dict) -> None:
    cache = make(ROWS, block_size=16, q_len=2, **options)
    first = cache.attend(backend="torch")
    for _ in range(3):
        assert torch.equal(permuted(cache).attend(backend="torch"), first)


def permuted(cache: Cache) -> Cache:
    """The same tokens in other blocks."""
    n = cache.k.shape[0]
    order = torch.randperm(n)
    inverse = torch.argsort(order).int()
    table = torch.where(cache.table < 0, cache.table, inverse[cache.table.clamp(min=0)])

    def moved(x: object) -> object:
        if isinstance(x, torch.Tensor):
            return x[order]
        return dataclasses.replace(x, **{name: getattr(x, name)[order] for name in ("codes", "scales", "minimums")})

    return dataclasses.replace(cache, k=moved(cache.k), v=moved(cache.v), table=table)


def test_strided_empty_and_scaled() -> None:
    cache = make(ROWS, q_len=2)
    wide = torch.zeros(4, 2, 4, 128)
    wide[..., ::2] = cache.q.transpose(1, 2)
    strided = dataclasses.replace(cache, q=wide[..., ::2].transpose(1, 2))
    torch.testing.assert_close(strided.attend(backend="torch"), cache.attend(backend="torch"))
    for scale in (0.3, 0.0):
        got = cache.attend(backend="torch", softmax_scale=scale)
        torch.testing.assert_close(got.double(), exact(cache, scale=scale), **CLOSE)
    # The longer buffer of which a cache is a part.
    buffer = [torch.full((4, 2, 200, 64), float("nan")) for _ in range(2)]
    for long, x in zip(buffer, (cache.k, cache.v), strict=True):
        long[:, :, : x.shape[2]] = x
    for length in (cache.k.shape[2], 200):
        k, v = (x[:, :, :length] for x in buffer)
        torch.testing.assert_close(dataclasses.replace(cache, k=k, v=v).attend(), cache.attend())
    for batch, q_len in ((0, 1), (2, 0)):
        k = torch.zeros(batch, 2, 8, 64)
        got = decode_attention(torch.zeros(batch, 4, q_len, 64), k, k, torch.zeros(batch, dtype=torch.int32))
        assert got.shape == (batch, 4, q_len, 64)
    k, table = torch.zeros(0, 2, 16, 64), torch.zeros(2, 0, dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    assert not decode_attention(torch.ones(2, 4, 1, 64), k, k, lengths, block_table=table).any()


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 4, "block_size": 64}, {"block_size": 16}, {"bits": 8}])
@pytest.mark.parametrize("length", [64, 100, 2500])
def test_nothing_as_large_as_the_keys_appears(options: dict, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is made on the way is at most half of one layer's keys, and a whole block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    cache, largest = make([length] * 4, heads=2, kv_heads=2, recent=16 if "bits" in options else 0, **options), [0]
    held = [t for x in (cache.k, cache.v) for t in getattr(x, "tensors", {"": x}).values()]
    owned = {t.untyped_storage().data_ptr() for t in held}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in owned:
                    largest[0] = max(largest[0], x.numel())
            return out

    expected = exact(cache)
    with Watch():
        got = cache.attend(backend="torch")
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    keys = 4 * 2 * length * 64
    assert 0 < largest[0] <= max(keys // 2, 4 * 2 * 64 * options.get("block_size", 0))
    assert chunked.chunk_size(length) <= min(1024, length // 2)


REFUSED = {
    "q": (lambda c: {"q": c.q[0]}, r"q: got 'shape \(4, 1, 64\)"),
    "heads": (lambda c: {"q": c.q[:, :3]}, "k: got 'shape .* takes a number of heads that divides q's 3"),
    "v": (lambda c: {"v": c.v[:, :, :9]}, "v: got 'Tensor"),
    "dtype": (lambda c: {"k": c.k.half()}, "k: got 'torch.float16"),
    "rows": (lambda c: {"lengths": c.lengths[:1]}, "cache_seqlens: got '1 rows"),
    "length": (lambda c: {"lengths": c.lengths + 1}, r"cache_seqlens: got \[21, 10\]; takes 0 to the tokens"),
    "negative": (lambda c: {"lengths": c.lengths - 10}, r"cache_seqlens: got \[10, -1\]"),
    "int64": (lambda c: {"lengths": c.lengths.long()}, "cache_seqlens: got 'torch.int64"),
    "batch": (lambda c: {"k": c.k[:1], "v": c.v[:1]}, "k: got '1 rows'; takes 2, as q has, without a block_table"),
    "table": (lambda c: {"table": torch.zeros(1, 3, dtype=torch.int32)}, "block_table: got '1 rows"),
    "mixed": (lambda c: {"v": kv_quantize(c.v, bits=8, group_size=1, axis="token")}, "v: got 'QuantizedKV"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    cache = make([20, 9])
    change, says = REFUSED[name]
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(cache, **change(cache)).attend()


def test_other_arguments_that_are_refused() -> None:
    cache = make([20, 9], q_len=2)
    for options, says in (
        ({"tree_mask": torch.ones(3, 3, dtype=torch.bool)}, r"tree_mask: got 'shape \(3, 3\)"),
        ({"softmax_scale": float("nan")}, "softmax_scale: got nan"),
        ({"backend": "cuda"}, "backend: got 'cuda'"),
    ):
        with pytest.raises(ValueError, match=says):
            cache.attend(**options)
    codes = make([20, 9], bits=4, recent=4)
    other = dataclasses.replace(codes.v, n_quantized=codes.v.n_quantized - 1)
    with pytest.raises(ValueError, match="v.n_quantized: got .*other tokens than k has in codes"):
        dataclasses.replace(codes, v=other).attend()
    # As many as the recent part has room for, and no more.
    with pytest.raises(ValueError, match="cache_seqlens"):
        dataclasses.replace(codes, lengths=codes.lengths + 9).attend()


def test_the_choice_and_its_reason() -> None:
    cache = make([20, 9])
    choice = choose_backend("decode_attention", cache.q, cache.k, cache.v)
    assert choice.name == "torch" and "q is float32" in choice.reason
    with pytest.raises(BackendUnavailable, match="decode_attention: backend 'triton' cannot run: .*q is float32"):
        cache.attend(backend="triton")
    k, v = (x.nan_to_num(0.0) for x in (cache.k, cache.v))
    gradient = dataclasses.replace(cache, q=cache.q.clone().requires_grad_(), k=k, v=v)
    gradient.attend().sum().backward()
    assert gradient.q.grad.isfinite().all() and gradient.q.grad.any()


@pytest.mark.parametrize("wrong", [-1, -2, 6, 99])
def test_a_block_that_is_read_must_exist(wrong: int) -> None:
    """Only what lies past a row's end may have any id."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(6, 2, 4, 16)
    table = torch.tensor([[0, 2, 5], [1, 3, wrong]], dtype=torch.int32)
    lengths = torch.tensor([9, 9], dtype=torch.int32)
    for backend in ("auto", "torch", "reference"):
        with pytest.raises(ValueError, match="block_table"):
            decode_attention(q, k, k, lengths, block_table=table, backend=backend)
    lengths = torch.tensor([9, 8], dtype=torch.int32)
    assert decode_attention(q, k, k, lengths, block_table=table).isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_nothing_asked_is_nothing_answered(backend: str) -> None:
    q, k, lengths = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16), torch.tensor([9, 9], dtype=torch.int32)
    assert decode_attention(q[:, :, :0], k, k, lengths, backend=backend).shape == (2, 4, 0, 16)
    with pytest.raises(ValueError, match="head_dim"):
        decode_attention(q[..., :0], k[..., :0], k[..., :0], lengths, backend=backend)
