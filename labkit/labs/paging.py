"""The lab of chapter 03 on paging: block size, reserved slots, a shared prompt; how much memory they leave empty."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets

from labkit.labs._frame import Lab
from labkit.labs._paging_compute import PagingCompute
from labkit.labs._paging_figure import build_figure, draw
from labkit.labs._paging_result import BLOCK_SIZES, MAX_LENGTH, MAX_NEW, SHARED_PREFIXES, PagingParams, PagingResult
from labkit.labs._prediction import Prediction
from labkit.labs._quantization_forms import share
from labkit.labs._spec import LabSpec

_DEFAULT_SIZE, _ASKED_SIZE = 16, 256

_HOW = (
    "Move a slider: requests as they really arrived are served from the same memory twice, in blocks and in one "
    "reserved piece each. What is empty is MEASURED on a real block manager; the server's speed "
    f"({PagingParams(16, MAX_LENGTH, 0).tokens_per_second:g} tokens/s a sequence) and the system prompt, put before "
    "every prompt, are MODELLED."
)


def _slider(description: str, options: Sequence[object], value: object, *, label: int) -> widgets.SelectionSlider:
    """`label`: pixels for the description, beside 210 for the rest."""
    width = {"width": f"{210 + label}px"}
    style = {"description_width": f"{label}px"}
    return widgets.SelectionSlider(
        options=options, value=value, description=description, continuous_update=False, layout=width, style=style
    )


def empty_share(results: Sequence[PagingResult]) -> str | None:
    """What the latest replay in the large blocks says, without a system prompt; None while there is none."""
    found: dict[int, PagingResult] = {r.params.block_size: r for r in results if not r.params.shared_prefix}
    if _ASKED_SIZE not in found:
        return None
    large = found[_ASKED_SIZE]
    before = f"; blocks of {_DEFAULT_SIZE}: {share(found[_DEFAULT_SIZE].paged.waste)}" if _DEFAULT_SIZE in found else ""
    return (
        f"{share(large.paged.waste)}{before}. Half a block stays empty at the end of each sequence, "
        f"{large.empty_slots:g} slots beside {large.paged.mean_length:,.0f} tokens."
    )


def paging_lab() -> Lab:
    """A lab over block size, reserved slots and a shared prompt: what a paged cache and a reserved one leave empty.

    It runs on the CPU and loads no model: what is measured is how memory is shared out. Errors are shown in the lab.
    """
    reserved = [(f"+{n:,}" if n < MAX_LENGTH else f"all {n:,}", n) for n in MAX_NEW]
    prompts = [(f"{n:,}" if n else "none", n) for n in SHARED_PREFIXES]
    question = f"Blocks of {_ASKED_SIZE} in place of {_DEFAULT_SIZE}: what share of the memory taken is then empty?"
    options = ("about 1%", "about 4%", "about 12%", "about 50%")
    return Lab(
        LabSpec(
            name="paging_lab",
            title="How much of a KV cache stays empty? Paged against reserved",
            how=_HOW,
            knobs={
                "block_size": _slider("Block size", BLOCK_SIZES, _DEFAULT_SIZE, label=75),
                "max_new": _slider("Reserved", reserved, MAX_LENGTH, label=75),
                "shared_prefix": _slider("System prompt", prompts, 0, label=115),
            },
            params=PagingParams,
            compute=PagingCompute(),
            figure=build_figure,
            draw=draw,
            device=None,
            prediction=Prediction(question, options, empty_share),
        )
    )
