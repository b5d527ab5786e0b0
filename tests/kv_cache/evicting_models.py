"""Models, steps and measures that the tests of the evicting caches share."""

from collections.abc import Callable

import torch
from transformers import Cache, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from labkit.models import tiny_model

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 600,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def family(name: str) -> torch.nn.Module:
    """A small random model of a family, or with a way to scale its rotary frequencies."""
    if name in ("qwen2", "qwen3"):
        config, kind = (Qwen2Config, Qwen2ForCausalLM) if name == "qwen2" else (Qwen3Config, Qwen3ForCausalLM)
        torch.manual_seed(3)
        return kind(config(**SHAPE)).eval().requires_grad_(False)
    scaling = {"llama": None, "llama3": LLAMA3, "yarn": YARN}[name]
    return tiny_model(rope_parameters=scaling) if scaling else tiny_model()


@torch.no_grad()
def logits_in_steps(model: torch.nn.Module, tokens: torch.Tensor, cache: Cache, steps: list[int]) -> torch.Tensor:
    """Logits of `tokens (batch, n)`, which go in as steps of these lengths (the last number repeats)."""
    out, start = [], 0
    while start < tokens.shape[1]:
        length = steps[min(len(out), len(steps) - 1)]
        out.append(model(tokens[:, start : start + length], past_key_values=cache).logits)
        start += length
    return torch.cat(out, dim=1)


def storage_bytes(cache: Cache) -> int:
    """Bytes of all storages that the cache's tensors keep alive, found by looking and not by asking the cache."""
    found = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(found.values())


def check_generate(model: torch.nn.Module, make_cache: Callable[[], Cache], make_full: Callable[[], Cache]) -> None:
    """Greedy and sampled tokens, and their logits, bit for bit those of another cache."""
    tokens = torch.randint(0, 256, (1, 23))
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_k": 20}):
        results = []
        for make in (make_cache, make_full):
            torch.manual_seed(5)
            out = model.generate(
                tokens,
                past_key_values=make(),
                max_new_tokens=12,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
            results.append((out.sequences, torch.stack(out.logits)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def check_two_calls(model: torch.nn.Module, make_cache: Callable[[], Cache]) -> None:
    """A second `generate` on the same cache goes on where the first stopped, as one step by step would."""
    tokens, more = torch.randint(0, 256, (1, 30)), torch.randint(0, 256, (1, 5))
    cache, other = make_cache(), make_cache()
    first = model.generate(tokens, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert cache.get_seq_length() == 35
    prompt = torch.cat((first, more), dim=1)
    second = model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert second.shape == (1, 45)
    logits = logits_in_steps(model, second[:, :-1], other, [30, 1, 1, 1, 1, 1, 6, 1])
    assert second[0, 30:36].tolist() == logits[0, 29:35].argmax(-1).tolist()
    assert second[0, 41:].tolist() == logits[0, 40:].argmax(-1).tolist()
