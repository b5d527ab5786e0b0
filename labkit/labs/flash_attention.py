"""The lab of chapter 04: length, head size, block size, causal; time and memory of attention with and without the
matrix of scores."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import ipywidgets as widgets
import torch

from labkit import _check
from labkit.labs._flash_attention_compute import FlashAttentionCompute
from labkit.labs._flash_attention_figure import build_figure, draw
from labkit.labs._flash_attention_forms import times
from labkit.labs._flash_attention_result import BLOCK_SIZES, HEAD_DIMS, FlashAttentionParams, FlashAttentionResult
from labkit.labs._frame import Lab
from labkit.labs._prediction import Prediction
from labkit.labs._result import si
from labkit.labs._spec import LabSpec
from labkit.measure import device_name

_DEFAULT_LEN, _DEFAULT_HEAD, _DEFAULT_BLOCK = 2048, 64, 128
_LONGEST = {"cpu": 8192, "cuda": 65536}
# A third as many KV heads as query heads on a CPU, a quarter on a GPU; few, so that a move is answered at once.
_HEADS = {
    "cpu": {"num_attention_heads": 3, "num_key_value_heads": 1, "dtype": "float32", "kernel": "tiled"},
    "cuda": {"num_attention_heads": 16, "num_key_value_heads": 4, "dtype": "bfloat16", "kernel": "triton"},
}

_HOW = (
    "Move a slider: the same attention runs three ways, in turn. The standard one holds the matrix of scores in "
    "memory; the other two go over it tile by tile and never hold it. Time and memory are MEASURED now, at this length "
    "and every shorter one."
)


def lengths_for(device: torch.device) -> tuple[int, ...]:
    """The lengths that the lab offers there."""
    return tuple(2**power for power in range(7, _LONGEST[device.type].bit_length()))


def _slider(description: str, options: Sequence[object], value: object) -> widgets.SelectionSlider:
    width = {"width": "255px"}
    style = {"description_width": "75px"}
    return widgets.SelectionSlider(
        options=options, value=value, description=description, continuous_update=False, layout=width, style=style
    )


def how_it_grows(results: Sequence[FlashAttentionResult]) -> str | None:
    """What the latest length at twice another of the same setting says of memory; None while there is none."""
    found: dict[FlashAttentionParams, FlashAttentionResult] = {}
    answer = None
    for result in results:
        found[result.params] = result
        half = found.get(result.params.at(result.params.seq_len // 2))
        if half:
            answer = _compared(half, result) or answer
    return answer


def _compared(half: FlashAttentionResult, result: FlashAttentionResult) -> str | None:
    """Of both roles, measured at both lengths."""
    sizes = {role: (half.peak(role), result.peak(role)) for role in ("standard", "native")}
    if any(size is None for pair in sizes.values() for size in pair):
        return None
    grown = {role: f"{times(b / a)} ({si(a, 'B')} to {si(b, 'B')})" for role, (a, b) in sizes.items()}
    lengths = f"from {half.params.seq_len:,} to {result.params.seq_len:,} tokens"
    return f"{lengths}, standard {grown['standard']}, without the matrix {grown['native']}: its output, and a constant."


def flash_attention_lab(*, device: torch.device | str | None = None) -> Lab:
    """A lab over length, head size, block size and causal: attention that holds the matrix of scores beside two that
    do not: their time, memory, bytes and FLOPs, under the measured roof.

    It loads no model. Errors while measuring are shown in the lab.
    """
    device = _check.device("device", device)
    lengths, fixed = lengths_for(device), _HEADS[device.type]
    where = device_name(device)
    if device.type == "cpu":
        count = torch.get_num_threads()
        where += f", {count} thread{'' if count == 1 else 's'}"
    causal = widgets.Checkbox(value=True, description="Causal", indent=False, layout={"width": "90px"})
    options = ("2x and 2x", "4x and 2x or less", "4x and 4x")
    question = "Twice the tokens: memory of standard attention, and of attention in tiles, grows how many times?"
    return Lab(
        LabSpec(
            name="flash_attention_lab",
            title=f"What does the matrix of scores cost? {where}",
            how=_HOW,
            knobs={
                "seq_len": _slider("Tokens", [(f"{n:,}", n) for n in lengths], _DEFAULT_LEN),
                "head_dim": _slider("Head size", HEAD_DIMS, _DEFAULT_HEAD),
                "block_size": _slider("Block size", BLOCK_SIZES, _DEFAULT_BLOCK),
            },
            switches={"causal": causal},
            params=functools.partial(FlashAttentionParams, **fixed),
            compute=FlashAttentionCompute(device, lengths),
            figure=functools.partial(build_figure, lengths, fixed["kernel"]),
            draw=draw,
            device=device,
            prediction=Prediction(question, options, how_it_grows),
        )
    )
