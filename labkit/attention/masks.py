"""The mask of `attn_implementation="labkit_flash"`: what `transformers` wants masked, in n numbers and never n x n.

`transformers` describes a mask by a function of (batch, head, query, key), made by its own factories. Only those of
them that the kernel can do are let through; they are known by their identity, so that anything else, a version's new
factory too, is refused and never lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType

import torch
from torch import Tensor
from transformers import masking_utils as hf

NAME = "labkit_flash"


def refused(what: str, instead: str = "attn_implementation='sdpa'") -> ValueError:
    """The error that says what this implementation does not do, and what does."""
    return ValueError(f"{NAME}: {what}; use {instead}")


# Functions that one factory makes share one code object, whatever they were made with.
_AND, _OR = hf.and_masks(hf.causal_mask_function).__code__, hf.or_masks(hf.causal_mask_function).__code__
_WINDOWS = (hf.sliding_window_overlay(1).__code__, hf.sliding_window_bidirectional_overlay(1).__code__)
_KNOWN: dict[CodeType, str] = {
    hf.packed_sequence_mask_function(torch.zeros(1, 1)).__code__: "sequences packed into one row are not kept apart",
    hf.chunked_overlay(1, torch.zeros(1)).__code__: "attention in chunks is not supported",
    _OR: "masks joined by `or` (a prefix or an image seen in both directions) are not supported",
}


def _made_with(function: Callable, name: str) -> object | None:
    """What a factory made `function` with; None where there is no such thing, and the function is not known."""
    variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return next((cell.cell_contents for variable, cell in variables if variable == name), None)


def _terms(function: Callable) -> Iterator[Callable]:
    """The functions that all have to be true where a query sees a key."""
    joined = _made_with(function, "mask_functions") if getattr(function, "__code__", None) is _AND else None
    if joined is None:
        yield function
        return
    for part in joined:
        yield from _terms(part)


def is_causal_mask(mask_function: Callable, keys_end: int) -> bool:
    """Whether the mask is the causal one, and not the one that hides nothing. Errors: ValueError for any other.

    A sliding window of at least `keys_end`, where the last key stops, hides nothing.
    """
    causal = False
    for term in _terms(mask_function):
        code = getattr(term, "__code__", None)
        window = _made_with(term, "sliding_window") if code in _WINDOWS else None
        if window is not None:
            if window < keys_end:
                raise refused(f"a sliding window of {window} cuts {keys_end} keys, and windows are not supported")
        elif term is hf.causal_mask_function:
            causal = True
        elif term is not hf.bidirectional_mask_function:
            raise refused(_KNOWN.get(code, "a mask function of the model's or the caller's own is not supported"))
    return causal


def _may_wait(tensor: Tensor) -> bool:
    """Whether a value may be looked at: not while a graph is captured or traced."""
    if torch.compiler.is_compiling():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _padding(attention_mask: Tensor | None, n_keys: int, kv_offset: int) -> Tensor | None:
    """Bool `(batch, n_keys)`, or None where nothing is padding; what a short mask does not reach is padding."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2:
        raise refused(f"a mask of shape {tuple(attention_mask.shape)} is not supported", "one of (batch, length)")
    columns = attention_mask[:, kv_offset : kv_offset + n_keys].bool()
    short = n_keys - columns.shape[1]
    if short:
        return torch.nn.functional.pad(columns, (0, short))
    # Once a forward, as transformers' own masks wait here: it saves every layer its mask.
    if _may_wait(columns) and bool(columns.all()):
        return None
    return columns.contiguous()  # whatever the caller expanded it from: `hides_nothing` reads strides


def _end_of_keys(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> int | Tensor:
    """Keys up to the last query's own, that one included: fewer than `kv_length` in a cache that has room left.

    A static cache counts its tokens in a tensor. For one query on a GPU that stays one, and nothing waits: a mask says
    what is filled. More queries have to be aligned to the keys, so that the number is read, once a forward.
    """
    if isinstance(q_offset, Tensor):
        stays = q_offset.is_cuda or torch.compiler.is_compiling()
        if q_length == 1 and stays:
            return q_offset + 1 - kv_offset
        q_offset = int(q_offset)
    end = q_offset + q_length - kv_offset
    if end > kv_length and q_length > 1:
        raise refused(f"{q_length} queries from position {q_offset} on stand past the {kv_length} keys of this cache")
    return min(end, kv_length)


def everything(batch_size: int, n_keys: int, device: torch.device | str) -> Tensor:
    """Bool `(batch_size, n_keys)`, all True in one byte: it hides nothing, and says how many keys there are."""
    return torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch_size, n_keys)


def hides_nothing(mask: Tensor) -> bool:
    """Whether it is known, without looking, that a mask has one value for all keys, as `everything` makes it."""
    return mask.shape[-1] > 1 and mask.stride(-1) == 0


def flash_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = hf.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> Tensor:
    """What `transformers` calls for a mask, once a forward; arguments as its `sdpa_mask` has them.

    Causal attention gets bool `(batch, length)`: K and V are `length` long up to the last query's token, and False is
    padding; one byte, expanded, where there is none. Where every query sees every key it is `(batch, 1, 1, length)`:
    one row for all queries.
    Errors: ValueError for a mask that the kernel cannot do, with what can.
    """
    causal = is_causal_mask(mask_function, kv_offset + kv_length)
    # One query on a static cache is asked for a mask in any case; a mask for more is to be changed by the model.
    asked = q_length > 1 and not (allow_is_causal_skip if causal else allow_is_bidirectional_skip)
    if asked:
        raise refused("this model wants the whole (queries, keys) mask, which is never made here")
    end = _end_of_keys(q_length, kv_length, q_offset, kv_offset) if causal else kv_length
    if isinstance(end, Tensor):
        filled = torch.arange(kv_length, device=device)[None] < end
        columns = _padding(attention_mask, kv_length, kv_offset)
        return (filled if columns is None else filled & columns).expand(batch_size, -1)
    columns = _padding(attention_mask, end, kv_offset)
    if columns is None:
        # Also where no mask were needed: some modules leave it to the mask to be causal, and None says nothing.
        columns = everything(batch_size, end, device)
    return columns if causal else columns.expand(batch_size, -1)[:, None, None]
