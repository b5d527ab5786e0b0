"""FlashAttention in a model of `transformers`: `attn_implementation="labkit_flash"`, with its own mask.

A mask is bool `(batch, length)`, and K and V are not repeated. The attention mask given to the model may have padding
on either side, holes, and rows that are padding alone, which give zeros. What the kernel cannot do is refused by a
ValueError that names what can.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from labkit._compat import name_attention
from labkit.attention.masks import NAME, flash_mask, hides_nothing, refused
from labkit.kernels import choose_backend, decode_attention, flash_attention

# Rows, queries times the query heads that share a KV head, up to which splitting the keys among programs pays more than
# giving each tile of queries one: FlashAttention's smallest tile of queries is half empty below.
_DECODE_ROWS = 32

# What other attention functions of transformers are told by name, and this one cannot do.
_REFUSED = {
    "softcap": "soft-capped scores are not supported",
    "s_aux": "attention sinks that the model has learned are not supported",
    "position_bias": "a bias on the scores by position is not supported",
    "indices": "attention to chosen keys is not supported",
    "block_indices": "attention to chosen blocks of keys is not supported",
    "cache": "continuous batching over transformers' paged cache is not supported",
    "cu_seq_lens_q": "sequences packed into one row are not kept apart",
    "cu_seq_lens_k": "sequences packed into one row are not kept apart",
    "cu_seqlens": "sequences packed into one row are not kept apart",
}
_EAGER = "attn_implementation='eager'"


def register() -> None:
    """Make `attn_implementation="labkit_flash"` known to `transformers`, for `from_pretrained`, `load_model` and
    `model.set_attn_implementation`; calling it again changes nothing."""
    name_attention(NAME)
    AttentionInterface.register(NAME, flash_attention_forward)
    AttentionMaskInterface.register(NAME, flash_mask)


def flash_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention as the modules of `transformers` call it: `(batch, q_len, num_attention_heads, head_dim)` and None for
    the weights, which are never made.

    query `(batch, num_attention_heads, q_len, head_dim)`; key, value `(batch, num_key_value_heads, kv_len, head_dim)`;
    attention_mask as `flash_mask` makes it. Without a mask the last query stands at the last key. Errors: ValueError
    for what the kernel cannot do, and for shapes that do not fit.
    """
    _refuse(dropout, kwargs)
    if value.shape[3] != key.shape[3]:
        raise refused(f"values of {value.shape[3]} channels beside keys of {key.shape[3]} are not supported")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is not None:
        attention_mask, is_causal = _columns(attention_mask)
        key, value = _held(key, value, attention_mask)
        attention_mask = None if hides_nothing(attention_mask) else attention_mask.expand(query.shape[0], -1)
    if sliding_window is not None and is_causal and sliding_window < key.shape[2]:
        raise refused(f"a sliding window of {sliding_window} cuts {key.shape[2]} keys, and windows are not supported")
    if attention_mask is None and _decodes(query, key, value, is_causal):
        lengths = torch.full((query.shape[0],), key.shape[2], dtype=torch.int32, device=query.device)
        output = decode_attention(query, key, value, lengths, softmax_scale=scaling)
    else:
        masked = {"causal": bool(is_causal), "padding_mask": attention_mask}
        output = flash_attention(query, key, value, softmax_scale=scaling, **masked)
    return output.transpose(1, 2).contiguous(), None


def _refuse(dropout: float, asked: dict[str, object]) -> None:
    """Refuse what would change the result and cannot be done."""
    if dropout:
        what = f"dropout of attention weights ({dropout}) is not supported: set the model's attention dropout to 0"
        raise refused(f"{what}, or call model.eval()")
    if asked.get("output_attentions"):
        raise refused("output_attentions asks for the weights, which are never made", _EAGER)
    for name, why in _REFUSED.items():
        if asked.get(name) is not None:
            raise refused(why, _EAGER)


def _columns(mask: object) -> tuple[Tensor, bool]:
    """The mask as bool `(batch, length)`, and whether attention is causal, which the mask decides: by tokens it is, and
    a row that holds for all queries is not. Some decoders' modules say that they are not causal, and mean the mask."""
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        kind = f"{str(mask.dtype).removeprefix('torch.')} {shape}" if isinstance(mask, Tensor) else shape
        raise refused(f"a mask made by hand ({kind}) is not supported, but a (batch, length) one given to the model is")
    if mask.ndim == 2:
        return mask, True
    if mask.ndim == 4 and mask.shape[1:3] == (1, 1):
        return mask[:, 0, 0], False
    raise refused(f"a mask of shape {shape} is not supported, but a (batch, length) one given to the model is")


def _held(key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as far as the mask reaches: a static cache gives all it has room for."""
    n_keys = mask.shape[1]
    if n_keys > key.shape[2]:
        raise refused(f"the mask is of {n_keys} keys and the cache gave {key.shape[2]}", "another cache")
    return (key, value) if n_keys == key.shape[2] else (key[:, :, :n_keys], value[:, :, :n_keys])


def _decodes(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether split-KV attention is the better kernel: few queries at the end of many keys, where it runs.

    FlashAttention gives each tile of queries and each head one program, which at one query a row leaves most of a GPU
    idle; split-KV divides the keys too, and reads K and V once for the query heads that share them. It takes no left
    padding: a padded batch stays with FlashAttention. On a CPU PyTorch's kernel takes both roads. This one makes the
    query heads of a KV head its queries, a product of matrices where the other has one of a matrix and a vector for
    each head: in bfloat16 from as fast to 25 times as fast, in float32 0.7 to 2 times (MEASURED on one thread of an
    AMD EPYC, 1 to 4 queries, 3 and 4 query heads to a KV head, 64 to 4096 keys).
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len >= kv_len or not (is_causal or q_len == 1):
        return False
    if q_len * (query.shape[1] // key.shape[1]) > _DECODE_ROWS:
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return False
    if not query.is_cuda:
        return query.shape[1] > key.shape[1]
    return choose_backend("decode_attention", query, key, value).name == "triton"
