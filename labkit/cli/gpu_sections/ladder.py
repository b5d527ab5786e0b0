"""The ladder on Llama-3.1-8B's shapes, batch 1, with drafts that are right seven times of ten."""

from labkit.cli.gpu_sections import Recorder
from labkit.cli.gpu_sections.speculative import forced_drafts, made_sure

_NAMES = ("llama-3.1-8b", "llama-3.2-1b")
_ALPHA, _GAMMA = 0.7, 4
_RUNGS = ("step", "int8", "int4", "int8_head", "attention", "quantized_kv", "speculation")
# bf16, INT8 and INT4 of the target side by side, a packed head, the draft, and what quantizing takes meanwhile.
_NEEDED_BYTES = 40e9
# Times the bf16 step from a CUDA graph, and times eager mode.
_OVER_GRAPH, _OVER_EAGER = 2.3, 8.0


def ladder(recorder: Recorder) -> None:
    """Every prefix of the rungs in turns; the table; the whole beside the two baselines."""
    import torch

    from labkit.engine.ladder import StackModels, measure_ladder
    from labkit.hardware import describe, measure_ceilings
    from labkit.models import shaped_model, tiny_model
    from labkit.quantization import RTNConfig

    free = describe(recorder.device).free_bytes
    if not recorder.tiny and free < _NEEDED_BYTES:
        recorder.record(
            "left out", f"{free / 1e9:.0f} GB are free, and all forms together take {_NEEDED_BYTES / 1e9:.0f}"
        )
        return
    if recorder.tiny:
        target, draft = tiny_model(), tiny_model(num_hidden_layers=1)
        prompt_length, new_tokens, repeats, group = 8, 6, 1, 64
    else:
        target, draft = (shaped_model(name, torch.bfloat16, recorder.device) for name in _NAMES)
        prompt_length, new_tokens, repeats, group = 128, 64, 1, 128
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(target.config.vocab_size, (1, prompt_length), generator=generator).to(recorder.device)
    configs = {bits: RTNConfig(bits=bits, group_size=group) for bits in (8, 4)}
    found = measure_ladder(
        StackModels(made_sure(target), configs=configs),
        _RUNGS,
        prompts=[prompt],
        proposer=forced_drafts(made_sure(draft), _ALPHA),
        num_assistant_tokens=_GAMMA,
        max_new_tokens=new_tokens,
        repeats=repeats,
        read_bandwidth=measure_ceilings(recorder.device).read_bandwidth,
        on_step=lambda step: recorder.record(f"ladder: {', '.join(step.rungs) or 'baseline'}", _figures(step)),
    )
    print(found, flush=True)
    recorder.record("acceptance", f"forced to {_ALPHA}: the draft model's tokens, spoiled by a coin")
    recorder.record("speed-ups", {step.title: round(found.speedup(step), 3) for step in found.measured()})
    for step in found.steps:
        if step.refused:
            recorder.record(f"left out: {step.rungs[-1]}", step.refused)
    over = found.speedup(found.top, found.of("step"))
    recorder.target("all rungs over the bf16 step from a CUDA graph", over, at_least=_OVER_GRAPH)
    recorder.target("all rungs over eager mode", found.speedup(found.top), at_least=_OVER_EAGER)


def _figures(step: object) -> dict[str, object]:
    """One line of the table, as numbers."""
    return {
        "title": step.title,
        "tokens per second": round(step.tokens_per_second, 2),
        "seconds to the first token": round(step.ttft.median, 5),
        "share of the ceiling": round(step.tokens_per_second / step.ceiling, 3),
        "peak bytes": step.peak_bytes,
        "weight bytes": step.weight_bytes,
        "tokens per target call": round(step.tokens_per_call, 3),
        "acceptance": step.acceptance,
    }
