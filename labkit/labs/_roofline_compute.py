"""What `roofline_lab` measures: a decode step and a prefill, whole and op by op. No widgets here."""

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import torch

from labkit.engine import Decoder, op_times
from labkit.hardware import Ceilings, datasheet, describe, measure_ceilings
from labkit.labs._result import Progress, si
from labkit.labs._roofline_result import OpPoint, PhaseResult, RooflineParams, RooflineResult
from labkit.measure import Timing, synchronize
from labkit.models import LoadedModel, load_model
from labkit.roofline import OpCost, memory_bytes, op_costs, time_floor

Cancelled = Callable[[], bool]

# One prefill may take this long by the roof; a longer prompt is cut, and the lab says so.
_PREFILL_FLOOR_S = 0.7
# Time for the repeats of a whole step, and again for the step op by op; slow steps run a few times all the same.
_REPEATS_S = 0.35
_LEAST_REPEATS = {"decode": 3, "prefill": 2}
# A whole step this much faster than the roof allows shows that the roof stands too low.
_BEATEN = 1.05
_HEADROOM = 0.9  # of the memory that is free


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
        dtype = getattr(torch, params.dtype)
        yield Progress(f"Loading {params.model} in {params.dtype}", 0.05)
        decoder, prefiller = self._decoders_for(dtype)
        yield Progress("Measuring this machine's ceilings (about 2 s, once)", 0.1)
        ceilings = self._raised_to(measure_ceilings(self._device))
        if cancelled():
            return
        config = decoder.model.config
        self._refuse_if_too_large(config, params, decoder)
        cache = "Filling the KV cache: {} tokens for each of {} sequences"
        yield Progress(cache.format(params.seq_len - 1, params.batch), 0.25)
        decoder.fill_cache(params.batch, params.seq_len - 1)
        if cancelled():
            return
        yield Progress("Decode step, whole and op by op", 0.4)
        decode = self._phase("decode", decoder, params, ceilings, params.batch, 1, cancelled)
        if decode is None:
            return
        sheet = datasheet(self._device)
        found = functools.partial(RooflineResult, params, str(self._device), ceilings, sheet, decode)
        yield found()
        length, uncut = self._prompt_costs(config, params, ceilings)
        yield Progress(f"Prefill of {length} tokens, whole and op by op", 0.7)
        prefiller.reset()
        prefill = self._phase("prefill", prefiller, params, ceilings, 1, length, cancelled)
        if prefill is None:
            return
        prefill = dataclasses.replace(prefill, uncut=uncut)
        yield found(prefill)
        if self._second_looks and any(phase.fraction > _BEATEN for phase in (decode, prefill)):
            self._second_looks -= 1
            yield Progress("A step beat the roof, which was measured too low: measuring it again", 0.9)
            yield found(prefill).under(self._raised_to(measure_ceilings(self._device, refresh=True)))

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

    def _refuse_if_too_large(self, config: object, params: RooflineParams, decoder: Decoder) -> None:
        """ValueError with the bytes and a batch or a length that would fit. The weights are loaded already."""
        cache = decoder.cache
        if cache is not None and cache.batch == params.batch and cache.max_length >= params.seq_len:
            return
        decoder.cache = cache = None
        free = self._free_bytes()

        def needed(batch: int, seq_len: int) -> int:
            memory = memory_bytes(config, params.dtype, batch, seq_len, q_len=1)
            return memory.total - memory.weights

        def largest(value: int, fits: Callable[[int], bool]) -> int:
            while value > 0 and not fits(value):
                value //= 2
            return value

        def room(batch: int, seq_len: int) -> bool:
            return needed(batch, seq_len) <= _HEADROOM * free

        if not room(params.batch, params.seq_len):
            batch = largest(params.batch, lambda value: room(value, params.seq_len))
            seq_len = largest(params.seq_len, lambda value: room(params.batch, value))
            raise ValueError(
                f"batch: got {params.batch} with seq_len {params.seq_len} in {params.dtype}, which needs "
                f"{si(needed(params.batch, params.seq_len), 'B')} beside the weights where {si(free, 'B')} are free; "
                f"takes at most batch {batch} at this length, or length {seq_len} at this batch"
            )

    @staticmethod
    def _prompt_costs(config: object, params: RooflineParams, ceilings: Ceilings) -> tuple[int, tuple[OpCost, ...]]:
        """The prompt's length, halved until the roof lets it run within the budget; the whole's costs if it was."""

        def costs(length: int) -> list[OpCost]:
            return op_costs(config, batch=1, q_len=length, kv_len=length, dtype=params.dtype, logits_to_keep=1)

        length = params.seq_len
        while length > 16 and time_floor(costs(length), ceilings, params.dtype) > _PREFILL_FLOOR_S:
            length //= 2
        return length, tuple(costs(params.seq_len)) if length < params.seq_len else ()

    def _phase(
        self,
        name: str,
        decoder: Decoder,
        params: RooflineParams,
        ceilings: Ceilings,
        batch: int,
        q_len: int,
        cancelled: Cancelled,
    ) -> PhaseResult | None:
        """Time one kind of step on top of what the decoder holds; None when cancelled."""
        config = decoder.model.config
        kv_len = decoder.length + q_len
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(config.vocab_size, (batch, q_len), generator=generator)
        steps = _time_steps(decoder, tokens, _LEAST_REPEATS[name], cancelled)
        if steps is None or cancelled():
            return None
        repeats = min(7, max(1, int(_REPEATS_S / steps.median)))
        seconds = op_times(decoder, tokens, repeats=repeats, warmup=0)
        costs = op_costs(config, batch=batch, q_len=q_len, kv_len=kv_len, dtype=params.dtype, logits_to_keep=1)
        ops = tuple(OpPoint(c, seconds[c.name], time_floor(c, ceilings, params.dtype)) for c in costs)
        return PhaseResult(name, batch, q_len, kv_len, steps, ops)


def _time_steps(decoder: Decoder, tokens: torch.Tensor, least: int, cancelled: Cancelled) -> Timing | None:
    """Seconds of whole steps, each cropped away again, after one to warm up; None when cancelled in between."""
    length = decoder.length
    samples: list[float] = []
    warm = False
    while len(samples) < least or (sum(samples) < _REPEATS_S and len(samples) < 50):
        if cancelled():
            return None
        synchronize(decoder.device)
        begin = time.perf_counter()
        decoder.forward(tokens, logits_to_keep=1)
        synchronize(decoder.device)
        if warm:
            samples.append(time.perf_counter() - begin)
        warm = True
        decoder.crop(length)
    return Timing.of(samples)
