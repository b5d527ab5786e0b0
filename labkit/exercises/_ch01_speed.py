"""Exercises `tokens_per_second` and `memory_bound_batch`: what the memory's bandwidth allows, and until which batch."""

import math
from collections.abc import Callable

import torch
from transformers import LlamaConfig

from labkit import _check
from labkit.engine import Decoder
from labkit.exercises._exercise import Answer, Exercise, Failed, as_number, expect, near, without_labkit
from labkit.measure import Label, Measurement, compare_ops
from labkit.models import LoadedModel, model_config
from labkit.roofline import op_costs

_SPEED_SIGNATURE = "tokens_per_second(config, context, bytes_per_element, bandwidth) -> tokens per second"
_WITHIN = 0.25
_MIN_RUN_S = 1.0  # a tenth of a second a step on two cores: ten of each
_PARAMS = ("model", "context", "bytes_per_element", "bandwidth")


def _step(loaded: LoadedModel, context: int) -> Callable[[], None]:
    """A decode step of one sequence on top of `context` cached tokens, which forgets its token again."""
    decoder = Decoder(loaded)
    decoder.fill_cache(1, context)
    token = torch.zeros(1, 1, dtype=torch.long)

    def step() -> None:
        decoder.forward(token)
        decoder.crop(context)

    return step


def measured_decode(loaded: LoadedModel, *, context: int, reference_context: int = 16) -> Measurement:
    """Tokens per second of one sequence's decode step at a context, for `check("tokens_per_second", ...)`.

    Its `params["bandwidth"]` is what the learner's function gets: the bytes/s that a step at `reference_context`
    reached in the same run, the two steps taking turns, so that a machine that slows down slows both. The caches are
    filled with random values, so that no prefill has to run. Takes some seconds.
    Errors: ValueError for a context that the model cannot hold.
    """
    config, dtype = loaded.model.config, loaded.model.dtype
    for name, value in (("context", context), ("reference_context", reference_context)):
        _check.integer(name, value, 1, config.max_position_embeddings - 1)
    steps = {"reference": _step(loaded, reference_context), "context": _step(loaded, context)}
    timings = compare_ops(steps, device=loaded.model.device, min_run_s=_MIN_RUN_S)
    costs = op_costs(config, batch=1, q_len=1, kv_len=reference_context + 1, dtype=dtype)
    reached = sum(cost.bytes for cost in costs) / timings["reference"].median
    timing, values = timings["context"], (loaded.name, context, dtype.itemsize, reached)
    return Measurement.of(
        "decode",
        1 / timing.median,
        "tokens/s",
        device=loaded.model.device,
        p10=1 / timing.p90,
        p90=1 / timing.p10,
        params=dict(zip(_PARAMS, values, strict=True)),
        dtype=dtype,
    )


def _shape(**changes: object) -> LlamaConfig:
    """A model whose embedding is a third of it, so that reading or leaving it out shows."""
    base = {
        "vocab_size": 8000,
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(base | changes))


def _elements(config: LlamaConfig) -> tuple[int, int, int]:
    """Elements of the layers, of one embedding table, and of K and V of one token; norms are left to the tolerance."""
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    layers = config.num_hidden_layers
    return layers * layer, config.vocab_size * config.hidden_size, 2 * layers * kv


def _test_bytes_read(answer: Answer) -> None:
    """What a step reads, seen from outside: the bandwidth over the tokens per second."""
    for config in (_shape(), _shape(tie_word_embeddings=True)):
        layers, table, kv = _elements(config)
        at_one, at_thousand = (1e9 / answer.number(config, n, 2, 1e9) / 2 for n in (1, 1001))
        expect(
            at_thousand > at_one, "a longer context should be slower: a step reads the K and V of every token before it"
        )
        each = (at_thousand - at_one) / 1000
        expect(near(each, kv, 0.02), f"each token of context adds {kv:,} elements of K and V; yours adds {each:,.0f}")
        step = f"{'a tied' if config.tie_word_embeddings else 'an untied'} model's step"
        both, headless = near(at_one, layers + 2 * table, 0.02), near(at_one, layers, 0.02)
        expect(not both, f"{step} reads one row of the input embedding, not the table; the head is read in full")
        expect(not headless, f"{step} reads the head in full, vocab_size * hidden_size, to get the logits")
        expect(near(at_one, layers + table, 0.02), f"{step} reads {layers + table:,} elements; yours, {at_one:,.0f}")
    grouped = _shape(num_key_value_heads=2)
    each = sum(sign * 1e9 / answer.number(grouped, n, 2, 1e9) / 2 for n, sign in ((1001, 1), (1, -1))) / 1000
    expect(near(each, _elements(grouped)[2], 0.02), "GQA: with 2 KV heads of 8, a token of context adds a quarter")


def _test_speed(given: object) -> str:
    function, measured = given if isinstance(given, tuple | list) and len(given) == 2 else (given, None)
    answer = Answer(function, _SPEED_SIGNATURE)
    config = _shape()
    at = answer.number(config, 64, 4, 1e9)
    expect(near(answer.number(config, 64, 4, 2e9), 2 * at, 1e-3), "twice the bandwidth should be twice as fast")
    expect(near(answer.number(config, 64, 2, 1e9), 2 * at, 1e-3), "half the bytes an element should be twice as fast")
    _test_bytes_read(answer)
    if not isinstance(measured, Measurement) or measured.label not in (Label.MEASURED, Label.RECORDED):
        raise Failed(
            "what a step reads is right; now pass the measurement too: (tokens_per_second, measured_decode(...))"
        )
    lacking = [name for name in _PARAMS if name not in measured.params]
    expect(not lacking, f"the measurement lacks {', '.join(lacking)}: make it with measured_decode(...)")
    model, *arguments = (measured.params[name] for name in _PARAMS)
    predicted = answer.number(model_config(model), *arguments)
    error = abs(predicted - measured.value) / measured.value
    figures = f"predicted {predicted:.1f} tokens/s, measured {measured.value:.1f}, {100 * error:.0f}% apart"
    far = f"more than {100 * _WITHIN:.0f}%. Is `bandwidth` what a step reaches, not the ceiling?"
    expect(error <= _WITHIN, f"{figures}, {far} Measure again if the machine was busy")
    return figures


TOKENS_PER_SECOND = Exercise(
    name="tokens_per_second",
    chapter=1,
    task="Predict tokens per second within 25% of the measurement, from the bytes that a decode step reads.",
    signature=_SPEED_SIGNATURE,
    hints=(
        "A decode step at batch 1 is memory-bound: its time is the bytes it reads over the bandwidth it reaches.",
        "It reads every matrix of every layer, the head, and K and V of the context; of the input embedding, one row.",
        "bytes = bytes_per_element * (layers * hidden * (2 * q + 2 * kv + 3 * intermediate) + vocab * hidden "
        "+ 2 * layers * kv * context), with q and kv the widths of queries and keys; the answer is bandwidth / bytes.",
    ),
    test=_test_speed,
)

_BATCH_SIGNATURE = "memory_bound_batch(matmul_flops, read_bandwidth, bytes_per_weight) -> smallest batch"
# An H200 in bf16, the same with int8 weights, two CPU cores in float32, and a slow chip with much bandwidth.
_DEVICES = ((989e12, 4.8e12, 2), (989e12, 4.8e12, 1), (59e9, 8.5e9, 4), (1e12, 4e12, 2))
_WEIGHTS = 10**6


def _test_batch(function: object) -> str:
    answer = Answer(function, _BATCH_SIGNATURE)
    for peak, bandwidth, size in _DEVICES:
        value = without_labkit(lambda a=(peak, bandwidth, size): answer(*a), ("sizing", "roofline", "step_costs"))
        batch = as_number(value, "the batch")
        given = f"at {peak:.3g} FLOP/s, {bandwidth:.3g} bytes/s and {size} bytes a weight"
        expect(batch == math.floor(batch), f"a batch is a whole number: round up; {given} got {batch:g}")
        reading = _WEIGHTS * size / bandwidth
        computing = [2 * b * _WEIGHTS / peak for b in (batch - 1, batch)]
        slow = f"{given}, reading a million weights takes {reading:.3g} s"
        still = f"{slow} and batch {batch:.0f} computes {computing[1]:.3g} s: still memory-bound"
        expect(computing[1] >= reading * (1 - 1e-9), f"{still}. Each weight costs a row one multiply-add, two FLOPs")
        already = f"{slow} and batch {batch - 1:.0f} already computes {computing[0]:.3g} s: a smaller batch would do"
        expect(
            batch == 1 or computing[0] < reading,
            f"{already}. Are bytes_per_weight and the two FLOPs a weight and row in it?",
        )
    return "memory-bound below it and compute-bound from it on, on four devices and weight sizes"


MEMORY_BOUND_BATCH = Exercise(
    name="memory_bound_batch",
    chapter=1,
    task="The smallest batch at which a decode step's matrices stop being memory-bound, activations left out.",
    signature=_BATCH_SIGNATURE,
    hints=(
        "The weights are read once for the whole batch; every row of the batch computes with all of them.",
        "Per weight: bytes_per_weight bytes are read, and 2 * batch FLOPs are computed. Set the two times equal.",
        "ceil(matmul_flops / read_bandwidth * bytes_per_weight / 2), and at least 1.",
    ),
    test=_test_batch,
)
