"""What `quantization_lab` measures: bytes, error by layer, one block by the method, speed, perplexity. No widgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from labkit.hardware import describe, measure_ceilings
from labkit.labs._quantization_models import Models, Packed, load_once
from labkit.labs._quantization_result import LayerErrors, Quality, QuantizationParams, QuantizationResult, Speed
from labkit.labs._quantization_steps import (
    Block,
    Inputs,
    calibrate_block,
    capture_inputs,
    layer_errors,
    measure_decode,
    quantize_block,
)
from labkit.labs._quantization_text import Texts, calibration_ids, prepare, read_own
from labkit.labs._result import Progress
from labkit.models import LoadedModel
from labkit.quality import perplexity_stream
from labkit.quantization.recorded import recorded_run

Cancelled = Callable[[], bool]
Steps = Iterator[Progress | QuantizationResult]

# A step this much faster than the ceiling allows shows that the ceiling stands too low.
_BEATEN = 1.05


class QuantizationCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and QuantizationResult, each fuller than the
    one before: bytes, errors, the block, speed, perplexity.

    `model` is a name for `load_model` or a loaded model; `text` the learner's own, a path or a string. What does not
    hang on the setting is measured once and kept: inputs, the block's statistics, the float model's speed and
    perplexity.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        device: torch.device,
        text: str | Path | None = None,
        *,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._given, self._device = model, device
        self._own_text = read_own(text)
        self._free_bytes = free_bytes or (lambda: describe(device).free_bytes)
        self._models: Models | None = None
        self._texts: Texts | None = None
        self._inputs: Inputs | None = None
        self._block: Block | None = None
        self._float_speed: Speed | None = None
        self._float_stream: Iterator[tuple[int, float]] | None = None
        self._float_perplexity: list[float] = []
        self._bandwidth = 0.0
        self._second_looks = 2

    def __call__(self, params: QuantizationParams, cancelled: Cancelled) -> Steps:
        yield from self._prepare(params)
        if cancelled():
            return
        yield Progress(f"Packing a copy of the model: {params.bits} bits, groups of {_group(params)}", 0.15)
        packed = self._models.pack(params)
        found = self._start(params, packed)
        yield found
        for part in (self._errors, self._method, self._speed, self._quality):
            for step in part(params, packed, found, cancelled):
                found = step if isinstance(step, QuantizationResult) else found
                yield step
            if cancelled():
                return

    def _prepare(self, params: QuantizationParams) -> Iterator[Progress]:
        """Model, text and inputs, once; and whether there is room for this setting, each time."""
        if self._models is None:
            yield Progress(f"Loading {params.model}", 0.02)
            loaded = load_once(self._given, self._device) if isinstance(self._given, str) else self._given
            models, self._texts = Models(loaded), prepare(loaded, self._own_text)
            self._models = models
        self._models.refuse_if_too_large(params, self._free_bytes())
        if self._inputs is None:
            yield Progress("What the text brings to each matrix of the float model (once)", 0.1)
            self._inputs = capture_inputs(self._models.loaded.model, self._models.plan, self._texts.errors)

    def _start(self, params: QuantizationParams, packed: Packed) -> QuantizationResult:
        """What is known once the weights are packed, and what was recorded."""
        run, why_not = None, ""
        if params.method != "RTN":
            own = self._own_text is not None
            run = None if own else recorded_run(params.method, params.bits, params.group_size)
            if run is not None and run.model != params.model:
                run = None
            why = "on your own text" if own else f"for {params.model} at this setting"
            why_not = "" if run else f"the whole model, {why}"
        return QuantizationResult(
            params=params,
            device=str(self._device),
            dtype=str(self._models.loaded.model.dtype).removeprefix("torch."),
            corpus="your text" if self._own_text is not None else "pydoc",
            sizes=packed.sizes,
            num_layers=len(self._models.plan.layers),
            recorded=run,
            not_recorded=why_not,
            float_speed=self._float_speed,
        )

    def _errors(
        self, params: QuantizationParams, packed: Packed, found: QuantizationResult, cancelled: Cancelled
    ) -> Steps:
        yield Progress("Output error of each matrix", 0.25)
        for errors in layer_errors(self._models.plan, packed.rounded, self._inputs, cancelled):
            yield dataclasses.replace(found, layers=errors)

    def _method(
        self, params: QuantizationParams, packed: Packed, found: QuantizationResult, cancelled: Cancelled
    ) -> Steps:
        """AWQ or GPTQ on one block, live."""
        if params.method == "RTN":
            return
        plan = self._models.plan
        if self._block is None:
            yield Progress("Calibration text through half of the float model (once)", 0.35)
            self._block = calibrate_block(self._models.loaded.model, plan, calibration_ids(self._models.loaded))
            if cancelled():
                return
        yield Progress(f"{params.method} on layer {self._block.index}, all of it", 0.5)
        rtn = _of_layer(found.layers, self._block.index)
        yield dataclasses.replace(found, block=quantize_block(plan, self._block, params, rtn, self._inputs))

    def _speed(
        self, params: QuantizationParams, packed: Packed, found: QuantizationResult, cancelled: Cancelled
    ) -> Steps:
        if not self._bandwidth:
            yield Progress("Measuring this machine's memory bandwidth (about 2 s, once)", 0.55)
            self._raise_bandwidth()
        if self._float_speed is None:
            yield Progress("Decoding with the bfloat16 model (once)", 0.6)
            self._float_speed = measure_decode(self._models.fast, self._bandwidth, cancelled)
        if cancelled():
            return
        yield Progress("Decoding with the packed weights", 0.65)
        speed = measure_decode(self._models.decoding(packed), self._bandwidth, cancelled)
        if speed is None:
            return
        if self._second_looks and max(speed.fraction, self._float_speed.fraction) > _BEATEN:
            self._second_looks -= 1
            yield Progress("A step beat the bandwidth, which was measured too low: measuring it again", 0.7)
            self._raise_bandwidth(refresh=True)
        self._float_speed, speed = (
            dataclasses.replace(one, bandwidth=self._bandwidth) for one in (self._float_speed, speed)
        )
        yield dataclasses.replace(found, speed=speed, float_speed=self._float_speed)

    def _raise_bandwidth(self, refresh: bool = False) -> None:
        """The highest so far: what a busy neighbour took away was there all the same."""
        self._bandwidth = max(self._bandwidth, measure_ceilings(self._device, refresh=refresh).read_bandwidth)

    def _quality(
        self, params: QuantizationParams, packed: Packed, found: QuantizationResult, cancelled: Cancelled
    ) -> Steps:
        """Perplexity of the whole model rounded to nearest, window by window beside the float model's."""
        if params.method != "RTN":
            return
        texts = self._texts
        stream = perplexity_stream(packed.model, texts.evaluation, texts.context_length)
        for window in range(texts.windows):
            done = 0.7 + 0.3 * window / texts.windows
            yield Progress(f"Perplexity: window {window + 1} of {texts.windows}", done)
            if cancelled():
                return
            baseline = self._float_over(window)
            if cancelled():
                return
            _, perplexity = next(stream)
            quality = Quality(perplexity, baseline, window + 1, texts.windows, texts.context_length)
            yield dataclasses.replace(found, quality=quality)

    def _float_over(self, window: int) -> float:
        """The float model's perplexity over the windows up to this one; each is run once."""
        if self._float_stream is None:
            texts = self._texts
            self._float_stream = perplexity_stream(self._models.loaded.model, texts.evaluation, texts.context_length)
        try:
            while len(self._float_perplexity) <= window:
                self._float_perplexity.append(next(self._float_stream)[1])
        except BaseException:
            # A generator that raised has ended: the next setting starts it again.
            self._float_stream, self._float_perplexity = None, []
            raise
        return self._float_perplexity[window]


def _group(params: QuantizationParams) -> str:
    return "a row" if params.group_size == -1 else str(params.group_size)


def _of_layer(layers: LayerErrors, index: int) -> dict[str, float]:
    return {kind: errors[index] for kind, errors in layers.by_kind.items()}
