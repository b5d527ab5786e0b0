"""The decode engine on real models' shapes with random weights: tokens per second and the bandwidth it reaches."""

import statistics

from labkit.cli.gpu_sections import Recorder

_PROMPT, _NEW_TOKENS, _ROUNDS = 128, 128, 3
_TINY = (8, 8, 1)


def _decoder(recorder: Recorder, name: str, *, at_least: float | None) -> None:
    """Batch 1 in bfloat16: decode with a CUDA graph and without, in turns; then the step op by op.

    `at_least` is the share of the measured read bandwidth that the step should reach.
    """
    import torch

    from labkit.engine import Decoder
    from labkit.hardware import measure_ceilings
    from labkit.models import shaped_model, tiny_model

    prompt_length, new_tokens, rounds = _TINY if recorder.tiny else (_PROMPT, _NEW_TOKENS, _ROUNDS)
    model = tiny_model() if recorder.tiny else shaped_model(name, torch.bfloat16, recorder.device)
    recorder.record("model", {"name": "tiny" if recorder.tiny else name, "dtype": str(model.dtype), "batch": 1})
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, prompt_length), generator=generator).to(recorder.device)
    modes = {"eager": False} if recorder.tiny else {"cuda_graph": True, "eager": False}
    decoders = {mode: Decoder(model, cuda_graph=graph) for mode, graph in modes.items()}
    tpot = _decode_in_turns(decoders, prompt, new_tokens, rounds)
    for mode, seconds in tpot.items():
        recorder.record(f"{mode}_tokens_per_second", 1 / seconds)
    if len(tpot) == 2:
        recorder.record("cuda_graph_speedup", tpot["eager"] / tpot["cuda_graph"])
    step_bytes = _step_bytes(model, prompt_length + new_tokens // 2)
    recorder.record("step_bytes", step_bytes)
    reached = step_bytes / min(tpot.values())
    recorder.record("bandwidth", {"reached": reached, "unit": "bytes/s"})
    share = reached / measure_ceilings(recorder.device).read_bandwidth
    recorder.record("share_of_read_bandwidth", share)
    if at_least is not None:
        recorder.target("decode bandwidth over measured read bandwidth", share, at_least=at_least)
    _record_ops(recorder, decoders["eager"], prompt)


def _decode_in_turns(decoders: dict, prompt: object, new_tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds a token of each decoder, in turns; the first of each, which captures, is left out."""
    seconds: dict[str, list[float]] = {mode: [] for mode in decoders}
    for turn in range(rounds + 1):
        for mode, decoder in decoders.items():
            result = decoder.generate(prompt, max_new_tokens=new_tokens)
            if turn:
                seconds[mode].append(result.tpot_s)
    return {mode: statistics.median(values) for mode, values in seconds.items()}


def _step_bytes(model: object, kv_len: int) -> int:
    """The least bytes that one decode step must move, by `op_costs`."""
    from labkit.roofline import op_costs

    return sum(cost.bytes for cost in op_costs(model.config, batch=1, q_len=1, kv_len=kv_len, dtype=model.dtype))


def _record_ops(recorder: Recorder, decoder: object, prompt: object) -> None:
    """Where a decode step's time goes, op by op, in microseconds over all layers."""
    from labkit.engine import op_times

    decoder.reset()
    decoder.forward(prompt)
    times = op_times(decoder, prompt[:, :1], repeats=3 if recorder.tiny else 10)
    recorder.record("op_microseconds", {op: round(timing.median * 1e6, 2) for op, timing in times.items()})


def decoder_1b(recorder: Recorder) -> None:
    """Small enough to be bound by kernel launches: what a CUDA graph gains shows here."""
    _decoder(recorder, "llama-3.2-1b", at_least=None)


def decoder_8b(recorder: Recorder) -> None:
    """Large enough to be bound by reading its weights."""
    _decoder(recorder, "llama-3.1-8b", at_least=0.65)
