"""What `Decoder` takes: the checks of its arguments, each in one sentence that says what would do."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from labkit import _check
from labkit.engine.cache import StaticKVCache
from labkit.kv_cache.interface import DecoderCache, RaggedCache, TreeCache

Lengths = int | Sequence[int] | torch.Tensor


def check_tokens(name: str, tokens: torch.Tensor, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Token ids `(batch, q_len)` as int64 on `device`; ids on the CPU are held against the vocabulary."""
    _check.tensor(name, tokens, ndim=2, dtypes=(torch.int64, torch.int32))
    _check.require(tokens.numel() > 0, name, tuple(tokens.shape), "at least one token of at least one row")
    if tokens.device.type == "cpu":
        low, high = map(int, tokens.aminmax())
        _check.require(0 <= low and high < vocab_size, name, f"ids {low} to {high}", f"0 to {vocab_size - 1}")
    return tokens.to(device, torch.int64)


def check_cuda_graph(cuda_graph: object, cache: object, device: torch.device) -> bool:
    """Whether steps run from CUDA graphs: where there is a GPU and the cache is static, unless told otherwise."""
    on_gpu, static = device.type == "cuda", cache is None or isinstance(cache, StaticKVCache)
    _check.require(cuda_graph in (None, True, False), "cuda_graph", cuda_graph, "True, False or None")
    _check.require(on_gpu or not cuda_graph, "cuda_graph", cuda_graph, f"None or False for a model on {device}")
    takes = f"None or False over a {type(cache).__name__}, whose tensors move as it grows"
    _check.require(static or not cuda_graph, "cuda_graph", cuda_graph, takes)
    return on_gpu and static and cuda_graph is not False


def check_streamer(streamer: object, rows: int | None = None) -> None:
    """Refuse what is not fed as `transformers` feeds a streamer; and, given the number of rows, more than one."""
    if streamer is None:
        return
    feeds = hasattr(streamer, "put") and hasattr(streamer, "end")
    _check.require(feeds, "streamer", type(streamer).__name__, "a streamer of transformers, or None")
    _check.require(rows in (None, 1), "streamer", f"{type(streamer).__name__} for {rows} rows", "one for one row")


def check_lengths(name: str, given: Lengths, held: list[int]) -> list[int]:
    """A number of tokens for each row, at most the `held` ones: from one number, or from one a row.

    One number is for every row, so that it is at most what the shortest holds."""
    if isinstance(given, torch.Tensor):
        _check.tensor(name, given, ndim=1, dtypes=(torch.int64, torch.int32))
        given = given.tolist()
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [_check.integer(name, given, 0, min(held, default=0))] * len(held)
    # An empty cache has no rows of its own yet.
    held = held if any(held) else [0] * len(given)
    takes = f"one length for all rows, or one for each of the {len(held)} held"
    _check.require(len(given) == len(held), name, f"{len(given)} lengths", takes)
    rows = enumerate(zip(given, held, strict=True))
    return [_check.integer(f"{name}[{row}]", length, 0, most) for row, (length, most) in rows]


def check_paths(paths: Sequence[Sequence[int]], starts: list[int], held: list[int]) -> list[list[int]]:
    """A path for each row: indices into the row's tokens from its start on, each larger than the one before."""
    _check.require(isinstance(paths, Sequence), "paths", type(paths).__name__, "a sequence of indices for each row")
    _check.require(len(paths) == len(held), "paths", f"{len(paths)} paths", f"one for each of the {len(held)} rows")
    checked = []
    for row, (path, start, length) in enumerate(zip(paths, starts, held, strict=True)):
        name = f"paths[{row}]"
        _check.require(isinstance(path, Sequence), name, path, "a sequence of indices")
        path = [_check.integer(name, i, 0, length - start - 1) for i in path]
        _check.require(all(a < b for a, b in pairwise(path)), name, path, "indices that ascend: ancestors first")
        checked.append(path)
    return checked


def check_ragged(name: str, lengths: list[int], cache: DecoderCache | None) -> None:
    """Refuse rows that would differ in length where the cache cannot hold them."""
    takes = f"one length for all rows of a {type(cache).__name__}; rows of different lengths need a StaticKVCache"
    _check.require(len(set(lengths)) < 2 or isinstance(cache, RaggedCache), name, f"rows of {lengths} tokens", takes)


def check_keeps_trees(cache: object) -> TreeCache:
    """Refuse a cache that cannot take a path out of a tree."""
    takes = "a StaticKVCache or a QuantizedCache: this one cannot keep a path of a tree, only crop a chain"
    _check.require(isinstance(cache, TreeCache), "cache", type(cache).__name__, takes)
    return cache
