"""Where a step's tokens stand: their slots in the cache, their rotary positions, and what each may look at."""

import torch
from transformers import PreTrainedModel

from labkit import _check
from labkit.kv_cache.interface import StepInput

RotaryTable = tuple[torch.Tensor, torch.Tensor]


def check_tree_mask(tree_mask: torch.Tensor, q_len: int) -> torch.Tensor:
    """A bool `(q_len, q_len)` mask in which every token sees itself, no later one, and all its ancestors' ancestors."""
    _check.tensor("tree_mask", tree_mask, ndim=2, dtypes=(torch.bool,))
    shape = tuple(tree_mask.shape)
    _check.require(shape == (q_len, q_len), "tree_mask", f"shape {shape}", f"({q_len}, {q_len}), one row a token")
    _check.require(
        bool(tree_mask.diagonal().all()), "tree_mask", "a False on the diagonal", "True at every token itself"
    )
    _check.require(not bool(tree_mask.triu(1).any()), "tree_mask", "a token that sees a later one", "ancestors first")
    reach = (tree_mask.float() @ tree_mask.float()) > 0
    _check.require(
        torch.equal(reach, tree_mask), "tree_mask", "a token without its ancestors' ancestors", "whole paths"
    )
    return tree_mask


def rotary_table(model: PreTrainedModel, max_length: int) -> RotaryTable:
    """cos and sin `(max_length, 1, head_dim)` of rotary positions (Su et al., 2021), the first half of sin negated.

    With that sign `x * cos + roll(x, head_dim / 2) * sin` is the rotation, in three kernels.
    """
    positions = torch.arange(max_length, device=model.device)[None]
    cos, sin = model.model.rotary_emb(torch.empty(1, dtype=model.dtype, device=model.device), positions)
    sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=sin.device)
    sign[: sin.shape[-1] // 2] = -1
    return cos[0, :, None], (sin * sign)[0, :, None]


def step_input(rotary: RotaryTable, past: int | list[int], q_len: int, tree_mask: torch.Tensor | None) -> StepInput:
    """Slots, positions and mask of `q_len` tokens after `past`, one length for all rows or one a row; `rotary` is a
    `rotary_table` that reaches them."""
    cos, sin = rotary
    allowed = None if tree_mask is None else check_tree_mask(tree_mask, q_len).to(cos.device)
    if isinstance(past, list):
        return _input_by_row(rotary, past, q_len, allowed)
    slots = torch.arange(past, past + q_len, device=cos.device)
    positions, mask = slots, None
    if allowed is not None:
        # A draft token stands as deep as it has ancestors, whatever its slot.
        positions = past + allowed.sum(-1) - 1
        mask = torch.cat((allowed.new_ones(q_len, past), allowed), dim=1)
    elif q_len > 1 and past:
        mask = torch.ones(q_len, past + q_len, dtype=torch.bool, device=cos.device).tril(past)
    return StepInput(slots, cos[positions], sin[positions], past + q_len, mask, mask is None and q_len > 1, allowed)


def _input_by_row(rotary: RotaryTable, past: list[int], q_len: int, allowed: torch.Tensor | None) -> StepInput:
    """`step_input` where row b begins after `past[b]`: everything has the rows in front."""
    cos, sin = rotary
    begin = torch.tensor(past, device=cos.device)[:, None]
    new = torch.arange(q_len, device=cos.device)
    kv_len = max(past) + q_len
    # Column j is the row's new token j - past; below 0 it is an old one, and from q_len on nothing of this row.
    column = torch.arange(kv_len, device=cos.device) - begin
    if allowed is None:
        positions, mask = begin + new, column[:, None] <= new[:, None]
    else:
        positions = begin + allowed.sum(-1) - 1
        seen = allowed.t()[column.clamp(0, q_len - 1)] & (column < q_len)[..., None]
        mask = (seen | (column < 0)[..., None]).transpose(1, 2)
    return StepInput(begin + new, cos[positions], sin[positions], kv_len, mask[:, None], False, allowed)
