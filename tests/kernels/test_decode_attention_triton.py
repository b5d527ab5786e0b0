"""decode_attention's Triton kernels in Triton's interpreter, against the definition in float64.

Around what a row owns lies NaN: one read too many shows. The interpreter multiplies float16 alone rightly.
"""

import dataclasses

import pytest
import torch

from labkit.kernels import BackendUnavailable, choose_backend
from labkit.kernels.decode_attention import launch
from labkit.kernels.decode_attention import triton as room
from tests.kernels.caches import Cache, exact, make, plain, random_tree
from tests.kernels.test_decode_attention import permuted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernel")


def half(lengths: list[int], **options: object) -> Cache:
    return make(lengths, dtype=torch.float16, **options)


def attend(cache: Cache, splits: int | None = None, tree_mask: torch.Tensor | None = None) -> torch.Tensor:
    scale = cache.q.shape[3] ** -0.5
    return launch.attend(cache.q, cache.k, cache.v, cache.lengths, cache.table, scale, tree_mask, splits=splits)


def check(cache: Cache, splits: int | None = None, tree_mask: torch.Tensor | None = None) -> None:
    """At most twice the error of the same formula by PyTorch in float16."""
    expected = exact(cache, tree_mask)
    got = attend(cache, splits, tree_mask)
    assert got.shape == cache.q.shape and got.dtype == cache.q.dtype and got.is_contiguous()
    off = (plain(cache, tree_mask).double() - expected).abs().max()
    assert (got.double() - expected).abs().max() <= 2 * off + 1e-3 * (expected.abs().max() == 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127])
@pytest.mark.parametrize(("q_len", "block_size"), [(1, 0), (1, 16), (3, 64)])
def test_rows_of_every_length(length: int, q_len: int, block_size: int) -> None:
    check(half([length, max(0, length - 5)], q_len=q_len, block_size=block_size, kv_heads=1), splits=2)


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_number_of_query_heads_a_kv_head(each: int, kv_heads: int) -> None:
    check(half([40, 0], heads=each * kv_heads, kv_heads=kv_heads, q_len=1 + each % 3, bits=16 if each % 2 else 4))


@pytest.mark.parametrize("q_len", [6, 11])
def test_more_rows_than_a_tile_holds(q_len: int) -> None:
    assert room.MOST_ROWS < 8 * q_len
    check(half([50, 7], heads=8, kv_heads=1, q_len=q_len), splits=2)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("recent", [0, 9])
@pytest.mark.parametrize("block_size", [0, 32])
@pytest.mark.parametrize("q_len", [1, 4])
def test_codes_with_and_without_a_recent_part(bits: int, recent: int, block_size: int, q_len: int) -> None:
    check(half([65, 7, 0], bits=bits, recent=recent, block_size=block_size, q_len=q_len, group=32), splits=2)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_every_size_of_head(head_dim: int, bits: int) -> None:
    check(half([70], heads=2, kv_heads=1, head_dim=head_dim, bits=bits, recent=3))


@pytest.mark.parametrize(
    ("bits", "v_bits", "group", "v_group", "head_dim"),
    [(4, 4, 16, 16, 64), (4, 4, 64, 64, 64), (2, 2, 32, 64, 64), (2, 2, 32, 4, 64), (8, 2, 16, 32, 128),
     (4, 8, 48, 128, 128), (4, 4, 16, 40, 80), (4, 4, 16, 80, 80), (8, 8, 16, 20, 80), (4, 2, 32, 1, 64)],
)  # fmt: skip
def test_groups_of_any_size(bits: int, v_bits: int, group: int, v_group: int, head_dim: int) -> None:
    """A group is a part of a field of the head, one, several, or lies across two."""
    check(half([80], kv_heads=1, bits=bits, v_bits=v_bits, group=group, v_group=v_group, head_dim=head_dim, recent=2))


@pytest.mark.parametrize("q_len", [2, 7])
@pytest.mark.parametrize("options", [{}, {"block_size": 16}, {"bits": 4, "recent": 3}, {"bits": 4}])
def test_tree_masks(q_len: int, options: dict) -> None:
    check(half([40, q_len, q_len - 1], q_len=q_len, **options), splits=2, tree_mask=random_tree(q_len))


@pytest.mark.parametrize("options", [{"block_size": 16}, {"block_size": 32, "bits": 4, "recent": 6}])
def test_a_permuted_block_table_changes_nothing(options: dict) -> None:
    cache = half([90, 33, 0], q_len=2, **options)
    first = attend(cache, 2)
    assert torch.equal(attend(cache, 2), first) and torch.equal(attend(permuted(cache), 2), first)


@pytest.mark.parametrize("splits", [2, 5, 11])
@pytest.mark.parametrize("options", [{}, {"bits": 8, "recent": 40}])
def test_the_number_of_splits_changes_no_more_than_rounding(splits: int, options: dict) -> None:
    """More splits than tiles among them: the rest see nothing, and nobody reads what they did not write."""
    cache = half([200, 31, 0], kv_heads=1, **options)
    one, many = attend(cache, 1), attend(cache, splits)
    torch.testing.assert_close(many, one, rtol=2e-3, atol=2e-3)
    assert not many[2].any()
    check(cache, splits)


def test_sums_of_small_integers_are_exact() -> None:
    """With a scale of 0 every token counts alike: the mean of integers, whatever the splits and blocks."""
    for options in ({"block_size": 16}, {"bits": 8, "group": 32, "recent": 4}):
        cache = half([128, 64], q_len=1, **options)
        got = launch.attend(cache.q, cache.k, cache.v, cache.lengths, cache.table, 0.0, None, splits=3)
        means = torch.stack([v[:, :n].mean(1) for v, n in zip(cache.dense[1], (128, 64), strict=True)])
        torch.testing.assert_close(got[:, ::2, 0].double(), means, rtol=2e-3, atol=1e-3)


def test_splits_fill_the_chip_and_none_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_multiprocessors", lambda device: 132)
    tile, device = launch.tile_for(16, 128), torch.device("cpu")
    assert launch.splits_for(tile, 128, 16384, device) == tile.programs * 132 // 128
    assert launch.splits_for(tile, 8, 16384, device) == 16384 // room.LEAST_TOKENS
    assert launch.splits_for(tile, 1, 1 << 20, device) == room.MOST_SPLITS
    assert launch.splits_for(tile, 1 << 20, 16384, device) == launch.splits_for(tile, 8, 100, device) == 1


def test_strided_queries_and_caches() -> None:
    cache = half([70, 20], q_len=2)
    expected = attend(cache)
    wide = torch.full((2, 2, 4, 128), float("nan")).half()
    for q in (wide[..., :64].transpose(1, 2), wide[..., ::2].transpose(1, 2), wide[..., :64].transpose(1, 2)):
        q.copy_(cache.q)
        assert torch.equal(attend(dataclasses.replace(cache, q=q)), expected)
    # A cache of more rows, heads and tokens than there are.
    long = [torch.full((3, 4, 200, 64), float("nan")).half() for _ in range(2)]
    for x, kept in zip(long, (cache.k, cache.v), strict=True):
        x[1:, 1:3, : kept.shape[2]] = kept
    k, v = (x[1:, 1:3] for x in long)
    assert torch.equal(attend(dataclasses.replace(cache, k=k, v=v), 1), attend(cache, 1))
    assert attend(dataclasses.replace(cache, q=cache.q[:0], k=k[:0], v=v[:0], lengths=cache.lengths[:0])).shape[0] == 0


@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_stay_in_their_row() -> None:
    cache = half([70, 70, 70], block_size=16)
    cache.k[cache.table[1, 2], 0, 3, 5] = float("nan")
    cache.v[cache.table[2, 0], 1, 1] = float("inf")
    got = attend(cache, 2)
    assert got[1, :2].isnan().all() and got[1, 2:].isfinite().all() and got[0].isfinite().all()
    assert got[2, 2:].isinf().all() and got[2, :2].isfinite().all()


def test_large_scores_do_not_overflow() -> None:
    cache = half([70, 33])
    cache = dataclasses.replace(cache, q=cache.q * 100)
    torch.testing.assert_close(attend(cache, 2).double(), exact(cache), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"head_dim": 272}, "heads of up to 256, and these have 272"),
        ({"bits": 4, "group": 8}, "groups of a multiple of 16 tokens; these have 8"),
    ],
)
def test_what_the_kernel_cannot_read(options: dict, says: str) -> None:
    cache = half([20], **options)
    with pytest.raises(BackendUnavailable, match=says):
        cache.attend(backend="triton")
    torch.testing.assert_close(cache.attend().double(), exact(cache), rtol=1e-2, atol=1e-2)


def test_codes_that_start_at_an_odd_byte() -> None:
    """The kernel reads words; in PyTorch they are read all the same."""
    cache = half([40], bits=4)
    wide = torch.zeros(*cache.k.codes.shape[:3], cache.k.codes.shape[3] + 1, dtype=torch.uint8)
    for odd in (wide[..., 1:], wide[..., :-1]):
        odd.copy_(cache.k.codes)
        moved = dataclasses.replace(cache, k=dataclasses.replace(cache.k, codes=odd))
        with pytest.raises(BackendUnavailable, match="have to start at an even byte"):
            moved.attend(backend="triton")
        assert torch.equal(moved.attend(), cache.attend(backend="torch"))
        assert torch.equal(moved.k.dequantize(), cache.k.dequantize())


def test_by_name_alone_without_a_gpu() -> None:
    cache = half([33])
    choice = choose_backend("decode_attention", cache.q, cache.k, cache.v)
    assert choice.name == "torch" and "its interpreter runs for backend='triton' alone" in choice.reason
    assert torch.equal(cache.attend(backend="triton"), attend(cache))
    with pytest.raises(BackendUnavailable, match="float16 alone in Triton's interpreter, and q is bfloat16"):
        make([33], dtype=torch.bfloat16).attend(backend="triton")
    swapped = half([32], bits=4, group=32)
    swapped = dataclasses.replace(swapped, k=swapped.v, v=swapped.k)
    with pytest.raises(BackendUnavailable, match="by token and by channel"):
        swapped.attend(backend="triton")
    gradient = dataclasses.replace(cache, q=cache.q.clone().requires_grad_())
    with pytest.raises(BackendUnavailable, match="no backward pass"):
        gradient.attend(backend="triton")
