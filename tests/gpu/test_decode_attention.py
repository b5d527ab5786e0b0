"""The compiled kernels for a cache on a GPU; without one, `gpu-check --allow-cpu` runs them in the interpreter."""

import dataclasses

import pytest
import torch

from labkit.kernels import choose_backend, kv_quantize
from labkit.kernels.decode_attention import launch
from tests.kernels.caches import Cache, exact, make, plain, random_tree
from tests.kernels.test_decode_attention import permuted

pytestmark = pytest.mark.gpu
pytest.importorskip("labkit.kernels.decode_attention.triton")

# Each form is compiled: few of each, since a section has 45 s.
CACHES = [
    {"head_dim": 128, "block_size": 16, "heads": 8},
    {"head_dim": 128, "q_len": 5, "heads": 6},
    {"head_dim": 64, "bits": 4, "group": 32, "recent": 20, "block_size": 64, "q_len": 3},
    {"head_dim": 128, "bits": 8, "group": 32, "recent": 7},
    {"head_dim": 128, "bits": 2, "group": 64, "block_size": 64},
    {"head_dim": 80, "bits": 4, "group": 16, "v_group": 40},
    {"head_dim": 256, "heads": 2, "kv_heads": 1, "block_size": 48},
]


def on(device: torch.device, lengths: list[int], **options: object) -> Cache:
    """In the dtype that the device multiplies rightly: Triton's interpreter takes float16 alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    return make(lengths, device=device, **{"dtype": dtype} | options)


def attend(cache: Cache, splits: int | None = None, tree_mask: torch.Tensor | None = None) -> torch.Tensor:
    scale = cache.q.shape[3] ** -0.5
    return launch.attend(cache.q, cache.k, cache.v, cache.lengths, cache.table, scale, tree_mask, splits=splits)


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_it_errs_at_most_twice_as_much_as_pytorch(options: dict, device: torch.device) -> None:
    lengths = [1000, 777, 0, 64, 1] if device.type == "cuda" else [70, 0]
    for dtype in (torch.bfloat16, torch.float16) if device.type == "cuda" and options is CACHES[0] else (None,):
        cache = on(device, lengths, **options, **({"dtype": dtype} if dtype else {}))
        expected, off = exact(cache), (plain(cache).double() - exact(cache)).abs().max()
        for splits in (1, 3):
            got = attend(cache, splits)
            assert got.isfinite().all() and (got.double() - expected).abs().max() <= 2 * off


@pytest.mark.parametrize("options", [{"block_size": 16}, {"bits": 4, "recent": 4, "group": 32}], ids=str)
def test_tree_masks(options: dict, device: torch.device) -> None:
    cache, tree = on(device, [200, 8, 40], q_len=8, **options), random_tree(8, device)
    off = (plain(cache, tree).double() - exact(cache, tree)).abs().max()
    assert (attend(cache, 2, tree).double() - exact(cache, tree)).abs().max() <= 2 * off


def test_the_same_bits_every_time(device: torch.device) -> None:
    lengths = [9000, 4321, 7] if device.type == "cuda" else [64, 7]
    for options in ({"block_size": 16}, {"bits": 4, "group": 32, "block_size": 64, "recent": 9}):
        cache = on(device, lengths, **options)
        first = attend(cache, 5)
        for _ in range(200 if device.type == "cuda" else 1):
            assert torch.equal(attend(cache, 5), first)


def test_a_permuted_block_table_changes_nothing(device: torch.device) -> None:
    if device.type == "cuda":
        cache = make([500, 90], block_size=16, dtype=torch.float16)
        caches = [cache, permuted(cache)]
        moved = [
            dataclasses.replace(
                c, **{name: getattr(c, name).to(device) for name in ("q", "k", "v", "lengths", "table")}
            )
            for c in caches
        ]
    else:
        cache = make([50, 20], block_size=16, dtype=torch.float16)
        moved = [cache, permuted(cache)]
    assert torch.equal(attend(moved[0], 2), attend(moved[1], 2))


def test_rows_far_into_a_large_cache(device: torch.device) -> None:
    """Offsets past 2^31 elements: the last blocks of 4.5 GB."""
    if device.type != "cuda" or torch.cuda.get_device_properties(device).total_memory < 24 << 30:
        pytest.skip("needs a GPU with 24 GB")
    blocks = torch.zeros(2200000 // 16 // 4, 8, 64, 128, dtype=torch.bfloat16, device=device)
    assert blocks.numel() > 1 << 31
    last = blocks.shape[0] - 1
    blocks[last].normal_()
    q = torch.randn(1, 8, 1, 128, dtype=torch.bfloat16, device=device)
    lengths = torch.tensor([60], dtype=torch.int32, device=device)
    far, near = (torch.tensor([[i]], dtype=torch.int32, device=device) for i in (last, 0))
    here = blocks[last:].clone()
    a = launch.attend(q, blocks, blocks, lengths, far, 0.1, None)
    assert torch.equal(a, launch.attend(q, here, here, lengths, near, 0.1, None))


def test_auto_takes_the_kernel(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("on a CPU the interpreter runs only by name")
    cache = on(device, [300, 20], block_size=16)
    assert choose_backend("decode_attention", cache.q, cache.k, cache.v).name == "triton"
    assert torch.equal(cache.attend(), attend(cache))


def test_a_cuda_graph_replays_it_as_rows_grow(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    cache = on(device, [300, 200], bits=4, group=32, block_size=64, recent=8)
    attend(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attend(cache)
    for fewer in (0, 3, 50):
        cache.lengths.sub_(fewer)
        cache.q.normal_()
        graph.replay()
        assert torch.equal(y, attend(cache))


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_of_the_cpu(bits: int, axis: str, device: torch.device) -> None:
    """The kernel's bytes are the reference's, in bfloat16 too."""
    for dtype in (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float16,):
        x = torch.randn(2, 1, 64, 64).to(dtype)
        x[0, 0, :32, :32] = 1.5
        known = kv_quantize(x, bits=bits, group_size=32, axis=axis, backend="reference")
        found = kv_quantize(x.to(device), bits=bits, group_size=32, axis=axis, backend="triton")
        for name, tensor in known.tensors.items():
            assert torch.equal(found.tensors[name].cpu(), tensor), name
