"""Attention as it is defined: the whole matrix of scores, in float32 or better."""

import torch


def flash_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T * softmax_scale) v over what each query sees; zeros where it sees nothing.

    q `(batch, num_attention_heads, q_len, head_dim)`; k, v `(batch, num_key_value_heads, kv_len, head_dim)`; keys, bool
    `(batch, kv_len)`: False where a key is padding. With `causal`, query i stands at place i + kv_len - q_len.
    """
    wide, (q_len, kv_len) = torch.promote_types(q.dtype, torch.float32), (q.shape[2], k.shape[2])
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(wide).repeat_interleave(group, dim=1) for x in (k, v))
    if keys is not None:  # whatever lies in padding, NaN too, is not to get in
        k, v = (x.masked_fill(~keys[:, None, :, None], 0.0) for x in (k, v))
    sees = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    sees = sees.tril(kv_len - q_len) if causal else sees
    sees = sees[None, None] if keys is None else sees & keys[:, None, None]
    scores = (q.to(wide) @ k.mT * softmax_scale).masked_fill(~sees, -torch.inf)
    # Where a query sees nothing, softmax gives NaN.
    weights = scores.softmax(-1).masked_fill(~sees.any(-1, keepdim=True), 0.0)
    return (weights @ v).to(q.dtype)
