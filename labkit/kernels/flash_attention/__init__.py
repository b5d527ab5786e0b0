"""Attention in one pass over K and V, without the matrix of scores in memory; forward and backward.

"triton" is the GPU's kernel. "torch" is PyTorch's own, also on a CPU. "tiled" is the algorithm in plain PyTorch, for
reading and for showing what block sizes do. "reference" is the definition, with the whole matrix, in float32.
"""

import math

import torch

from labkit import _check
from labkit.kernels._backend import BackendUnavailable, Choice, why_no_triton
from labkit.kernels.flash_attention.native import native_attention
from labkit.kernels.flash_attention.reference import flash_attention_reference
from labkit.kernels.flash_attention.tiled import BLOCK_SIZES, TiledAttention
from labkit.kernels.flash_attention.tiles import check_block_sizes

BACKENDS = ("triton", "torch", "tiled", "reference")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

__all__ = ["BACKENDS", "choose", "flash_attention", "why_not_triton"]


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse queries, keys and values that do not belong together."""
    _check.tensor("q", q, ndim=4, dtypes=_FLOATS)
    _check.require(q.shape[3] > 0, "q", f"shape {tuple(q.shape)}", "a head_dim of at least 1")
    for name, x in (("k", k), ("v", v)):
        _check.tensor(name, x, ndim=4, dtypes=(q.dtype,))
        _check.require(x.device == q.device, name, f"on {x.device}", f"{q.device}, where q is")
    batch, heads, _, head_dim = q.shape
    fits = k.shape[1] > 0 and heads % k.shape[1] == 0 and (k.shape[0], k.shape[3]) == (batch, head_dim)
    takes = f"({batch}, a number that divides q's {heads} heads, kv_len, {head_dim}): K and V are not repeated"
    _check.require(fits, "k", f"shape {tuple(k.shape)}", takes)
    _check.require(v.shape == k.shape, "v", f"shape {tuple(v.shape)}", f"k's, {tuple(k.shape)}")


def _check_padding(q: torch.Tensor, k: torch.Tensor, seqlens_k: object, padding_mask: object) -> None:
    """Refuse lengths and masks that are not those of k's keys."""
    batch, kv_len = k.shape[0], k.shape[2]
    if seqlens_k is not None:
        _check.tensor("seqlens_k", seqlens_k, ndim=1, dtypes=(torch.int32, torch.int64))
        _check.require(len(seqlens_k) == batch, "seqlens_k", f"{len(seqlens_k)} rows", f"{batch}, as q has")
        # Off the CPU no value is looked at, so that nothing waits.
        inside = seqlens_k.device.type != "cpu" or bool(((seqlens_k >= 0) & (seqlens_k <= kv_len)).all())
        _check.require(inside, "seqlens_k", seqlens_k, f"numbers of keys from 0 to {kv_len}")
    if padding_mask is not None:
        _check.tensor("padding_mask", padding_mask, ndim=2, dtypes=(torch.bool,))
        shape = tuple(padding_mask.shape)
        _check.require(
            shape == (batch, kv_len), "padding_mask", f"shape {shape}", f"(batch, kv_len), {(batch, kv_len)}"
        )
    for name, x in (("seqlens_k", seqlens_k), ("padding_mask", padding_mask)):
        _check.require(x is None or x.device == q.device, name, f"on {getattr(x, 'device', None)}", f"{q.device}")


def _seen_keys(k: torch.Tensor, seqlens_k: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Bool `(batch, kv_len)`, False where a key is padding; None where there is none."""
    if seqlens_k is None:
        return mask
    inside = torch.arange(k.shape[2], device=k.device) < seqlens_k[:, None]
    return inside if mask is None else inside & mask


def _bounds(keys: torch.Tensor) -> torch.Tensor:
    """Int32 `(batch, 2)`: of each row the first key that is seen, and one past the last; 0 and 0 where none is."""
    count = keys.shape[1]
    seen = keys.int()
    first, last = seen.argmax(1), count - seen.flip(1).argmax(1)
    return torch.stack((first, last), dim=1).masked_fill(~keys.any(1, keepdim=True), 0).int()


def choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Choice:
    """As `choose_backend("flash_attention", q, k, v)`."""
    _check_heads(q, k, v)
    reason = why_not_triton(q, k, v)
    if reason is None and q.device.type != "cuda":
        reason = "its interpreter runs for backend='triton' alone"
    if reason is None:
        return Choice("triton", "FlashAttention-2's tiles")
    return Choice("torch", f"PyTorch's own kernel; the Triton kernel cannot run this: {reason}")


def why_not_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[int, int] | None = None
) -> str | None:
    """Why the Triton kernel cannot run these, with tiles of `blocks` if given; None where it can."""
    if reason := why_no_triton(q.device):
        return reason
    from labkit.kernels.flash_attention import launch as room

    return room.why_not(q, k, v, blocks)


def _automatic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[int, int] | None) -> str:
    """The backend of "auto": where block sizes are asked for, one that takes them."""
    if q.is_cuda and why_not_triton(q, k, v, blocks) is None:
        return "triton"
    return "torch" if blocks is None else "tiled"


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    seqlens_k: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    block_sizes: tuple[int, int] | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attention of `q (batch, num_attention_heads, q_len, head_dim)` to `k`, `v (batch, num_key_value_heads, kv_len,
    head_dim)`, which are not repeated; `(batch, num_attention_heads, q_len, head_dim)`. Differentiable once.

    Query i stands at place i + kv_len - q_len, and with `causal` sees no key after it. seqlens_k: int `(batch,)`, keys
    from there on are padding. padding_mask: bool `(batch, kv_len)`, False where a key is padding, wherever that is;
    what lies there, NaN too, never gets in. A query that sees nothing gives zeros, and zero gradients. softmax_scale:
    1 / sqrt(head_dim) where not given.
    block_sizes: queries and keys of a tile; "triton" takes powers of two, "tiled" any, the others have none to choose.
    Source: Dao et al. 2022 (arXiv:2205.14135), Dao 2023 (arXiv:2307.08691).
    Errors: ValueError for what does not fit together; BackendUnavailable where a backend asked for by name cannot run.
    """
    _check.choice("backend", backend, ("auto", *BACKENDS))
    _check.require(isinstance(causal, bool), "causal", causal, "True or False")
    _check_heads(q, k, v)
    _check_padding(q, k, seqlens_k, padding_mask)
    blocks = None if block_sizes is None else check_block_sizes(block_sizes)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else _check.number("softmax_scale", softmax_scale)
    name = _automatic(q, k, v, blocks) if backend == "auto" else backend
    if name in ("torch", "reference") and blocks is not None:
        raise BackendUnavailable(f"flash_attention: backend {name!r} takes no block_sizes; 'triton' and 'tiled' do")
    if backend == "triton" and (reason := why_not_triton(q, k, v, blocks)):
        raise BackendUnavailable(f"flash_attention: backend 'triton' cannot run: {reason}")
    if not q.numel() or not k.numel():
        # Nothing is seen, and every input has a gradient, of zeros.
        zeros = q.masked_fill(torch.ones((), dtype=torch.bool, device=q.device), 0.0)
        return zeros + (k[:, :0].sum() + v[:, :0].sum())
    keys = _seen_keys(k, seqlens_k, padding_mask)
    with torch.autocast(q.device.type, enabled=False):
        if name == "triton":
            return _triton(q, k, v, causal, scale, keys, padding_mask, blocks)
        if name == "torch":
            return native_attention(q, k, v, causal, scale, keys)
        if name == "tiled":
            return TiledAttention.apply(q, k, v, causal, scale, keys, blocks or BLOCK_SIZES)
        return flash_attention_reference(q, k, v, causal, scale, keys)


def _triton(q, k, v, causal: bool, scale: float, keys, padding_mask, blocks) -> torch.Tensor:
    from labkit.kernels.flash_attention import launch as room

    # What the bounds say, the kernel need not look up; only a mask can have holes between them.
    bounds = None if keys is None else _bounds(keys)
    holes = None if padding_mask is None else keys
    return room.attend(q, k, v, causal, scale, bounds, holes, blocks)
