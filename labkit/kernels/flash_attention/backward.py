"""What launches the kernels of the backward pass: which tiles, and the pointers. Nothing here waits for a GPU."""

import torch

from labkit.kernels.flash_attention.backward_kernels import _delta_kernel, _dk_dv_kernel, _dq_kernel
from labkit.kernels.flash_attention.blocks import BACKWARD, backward_blocks_for, chip_class, padded_head
from labkit.kernels.flash_attention.layout import LOG2_E, can_describe, capability, describe, last_together

DELTA_ROWS, DELTA_WARPS = 64, 4


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    bounds: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    block_sizes: tuple[int, int] | None = None,
    described: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v, in their shapes and dtypes.

    `dout` and `out` `(batch, num_attention_heads, q_len, head_dim)` as q; k, v `(batch, num_key_value_heads, kv_len,
    head_dim)`; `lse` `(batch, num_attention_heads, q_len)`, float32: the logarithm to base 2 of a query's sum of
    exponentials, minus infinity where it saw nothing. `bounds` `(batch, 2)`, int32: the first key that is no padding
    and one past the last; `padding_mask` `(batch, kv_len)`, bool: False is padding, where there are holes as well.
    `block_sizes` (of queries, of keys) overrides the table's. `described`: by descriptors, or by pointers; None is what
    is better on this GPU where the tensors allow it (of keys that may be padding, dQ's kernel always by pointers).
    """
    if not q.numel() or not k.numel():
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    q, k, v, out, dout = map(last_together, (q, k, v, out, dout))
    dq, dk, dv = map(_like, (q, k, v))
    if described is None:
        described = (chip_class(capability(q.device)), True) in BACKWARD and can_describe(q, k, v, dout)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(q):
        lse = lse.contiguous()
        common = (
            lse,
            _delta(out, dout),
            lse if bounds is None else bounds.contiguous(),
            lse if padding_mask is None else padding_mask.contiguous(),
        )
        has = (bounds is not None, padding_mask is not None)
        for kernel, gradients in ((_dk_dv_kernel, (dk, dv)), (_dq_kernel, (dq,))):
            # Descriptors would read keys that are padding as well: for dQ that puts zero times NaN into a query's sum.
            reads = described and not (kernel is _dq_kernel and any(has))
            fixed = constants(q.shape[3], q.shape[1] // k.shape[1], causal, *has, reads)
            _launch(kernel, (q, k, v, dout), common, gradients, softmax_scale, fixed, block_sizes)
    return dq, dk, dv


def _like(x: torch.Tensor) -> torch.Tensor:
    """Without values, laid out as x where that leaves the channels side by side."""
    made = torch.empty_like(x)
    return made if made.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def constants(
    head_dim: int, heads_each: int, causal: bool, has_bounds: bool, has_mask: bool, described: bool
) -> dict[str, object]:
    """The kernels' constants by name, except for the block sizes."""
    return {
        "heads_each": heads_each,
        "causal": causal,
        "has_bounds": has_bounds,
        "has_mask": has_mask,
        "head_dim": head_dim,
        "head_dim_p": padded_head(head_dim),
        "described": described,
    }


def _delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out), `(batch, heads, q_len)`, float32."""
    batch, heads, q_len, head_dim = out.shape
    delta = torch.empty(batch, heads, q_len, dtype=torch.float32, device=out.device)
    _delta_kernel[(batch * heads * -(-q_len // DELTA_ROWS),)](
        out,
        dout,
        delta,
        heads,
        q_len,
        *out.stride()[:3],
        *dout.stride()[:3],
        head_dim=head_dim,
        head_dim_p=padded_head(head_dim),
        rows=DELTA_ROWS,
        num_warps=DELTA_WARPS,
    )
    return delta


def _launch(
    kernel: object,
    tensors: tuple[torch.Tensor, ...],
    common: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    softmax_scale: float,
    fixed: dict[str, object],
    block_sizes: tuple[int, int] | None,
) -> None:
    """One of the two kernels over q, k, v and dout, and lse, delta, bounds and mask."""
    q, k = tensors[:2]
    described = fixed["described"]
    tile = backward_blocks_for(q.shape[3], capability(q.device), described)[kernel is _dq_kernel]
    block_q, block_k = block_sizes or (tile.block_q, tile.block_k)
    readers = tensors
    if described:
        rows = (block_q, block_k, block_k, block_q)
        readers = tuple(describe(x, n, fixed["head_dim_p"]) for x, n in zip(tensors, rows, strict=True))
    owned, block = (q, block_q) if kernel is _dq_kernel else (k, block_k)
    kernel[(owned.shape[0] * owned.shape[1] * -(-owned.shape[2] // block),)](
        *readers,
        *common,
        *gradients,
        softmax_scale,
        softmax_scale * LOG2_E,
        k.shape[1],
        q.shape[2],
        k.shape[2],
        *(stride for x in (*tensors, *gradients) for stride in x.stride()[:3]),
        **fixed,
        block_q=block_q,
        block_k=block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
