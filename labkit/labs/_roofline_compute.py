"""What `roofline_lab` measures: a decode step and a prefill, whole and op by op. No widgets here."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from labkit.engine import Decoder
from labkit.hardware import Ceilings, datasheet, describe, measure_ceilings
from labkit.labs._result import Progress
from labkit.labs._roofline_result import RooflineParams, RooflineResult
from labkit.labs._roofline_steps import cut_prompt, measure_step, refuse_if_too_large
from labkit.models import LoadedModel, load_model

Cancelled = Callable[[], bool]

# A whole step this much faster than the roof allows shows that the roof stands too low.
_BEATEN = 1.05


@functools.lru_cache(maxsize=8)
def _load_once(name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """One copy of a model a process, dtype and device, whichever labs ask for it."""
    return load_model(name, dtype=dtype, device=device)


class RooflineCompute:
    """`compute` of the lab: `compute(params, cancelled)` yields Progress and RooflineResult, decode before prefill.

    `model` is a name for `load_model` or a loaded model, which serves its own dtype and is copied for the others.
    The decoders of the latest dtype are kept, and with them the cache's memory.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        device: torch.device,
        *,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._given = model
        self._device = device
        self._free_bytes = free_bytes or (lambda: describe(device).free_bytes)
        self._copies: dict[torch.dtype, LoadedModel] = {}
        self._decoders: tuple[torch.dtype, Decoder, Decoder] | None = None
        self._highest: Ceilings | None = None
        self._second_looks = 2

    def __call__(self, params: RooflineParams, cancelled: Cancelled) -> Iterator[Progress | RooflineResult]:
        yield Progress(f"Loading {params.model} in {params.dtype}", 0.05)
        decoder, prefiller = self._decoders_for(getattr(torch, params.dtype))
        yield Progress("Measuring this machine's ceilings (about 2 s, once)", 0.1)
        ceilings = self._raised_to(measure_ceilings(self._device))
        yield Progress(f"Filling the KV cache: {params.seq_len - 1} tokens for each of {params.batch} sequences", 0.25)
        if cancelled():
            return
        self._fill(decoder, params)
        yield Progress("Decode step, whole and op by op", 0.4)
        decode = measure_step("decode", decoder, (params.batch, 1), ceilings, cancelled)
        if decode is None:
            return
        found = RooflineResult(params, str(self._device), ceilings, datasheet(self._device), decode)
        yield found
        length, uncut = cut_prompt(decoder.model.config, params, ceilings)
        yield Progress(f"Prefill of {length} tokens, whole and op by op", 0.7)
        prefiller.reset()
        prefill = measure_step("prefill", prefiller, (1, length), ceilings, cancelled)
        if prefill is not None:
            found = dataclasses.replace(found, prefill=dataclasses.replace(prefill, uncut=uncut))
            yield found
            yield from self._second_look(found)

    def _fill(self, decoder: Decoder, params: RooflineParams) -> None:
        """Hold all but the last token of the context, after making sure that there is room for it."""
        cache = decoder.cache
        if cache is None or cache.batch != params.batch or cache.max_length < params.seq_len:
            decoder.cache = cache = None  # its memory counts as free
            refuse_if_too_large(decoder.model.config, params, self._free_bytes())
        decoder.fill_cache(params.batch, params.seq_len - 1)

    def _second_look(self, found: RooflineResult) -> Iterator[Progress | RooflineResult]:
        """Measure the roof again where a whole step beat it. A cache may well beat it for good: so twice at most."""
        if self._second_looks and any(phase.fraction > _BEATEN for phase in found.phases):
            self._second_looks -= 1
            yield Progress("A step beat the roof, which was measured too low: measuring it again", 0.9)
            yield found.under(self._raised_to(measure_ceilings(self._device, refresh=True)))

    def _decoders_for(self, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
        """One decoder for decode and one for prefill, each with its cache, over one model."""
        if self._decoders is None or self._decoders[0] != dtype:
            self._decoders = None
            loaded = self._model_in(dtype)
            self._decoders = dtype, Decoder(loaded), Decoder(loaded)
        return self._decoders[1:]

    def _raised_to(self, measured: Ceilings) -> Ceilings:
        """The highest of what has been measured: what a busy neighbour took away was there all the same."""
        best = self._highest
        if best is not None and best.threads == measured.threads:
            flops = {dtype: max(value, best.matmul_flops[dtype]) for dtype, value in measured.matmul_flops.items()}
            read = max(best.read_bandwidth, measured.read_bandwidth)
            measured = dataclasses.replace(measured, read_bandwidth=read, matmul_flops=flops)
        self._highest = measured
        return measured

    def _model_in(self, dtype: torch.dtype) -> LoadedModel:
        if isinstance(self._given, str):
            return _load_once(self._given, dtype, self._device)
        if self._given.model.dtype == dtype:
            return self._given
        if dtype not in self._copies:
            model = copy.deepcopy(self._given.model).to(dtype)
            self._copies[dtype] = LoadedModel(model, self._given.tokenizer, self._given.name)
        return self._copies[dtype]
