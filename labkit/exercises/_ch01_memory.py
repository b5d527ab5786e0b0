"""Exercise `model_memory`: bytes of weights and KV cache from a config, tested on models that are really built."""

import functools

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from labkit.exercises._exercise import Answer, Exercise, as_number, expect, near, without_labkit

_SIGNATURE = "model_memory(config, batch, seq_len, bytes_per_element) -> (weight_bytes, kv_bytes)"
_BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_TOKENS = 5


def _config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**(_BASE | changes))


@functools.lru_cache
def _real_elements(**changes: object) -> tuple[int, int]:
    """Elements of the parameters of a model built from the config, and of the cache after one sequence of 5 tokens."""
    model = LlamaForCausalLM(_config(**changes)).eval()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.zeros(1, _TOKENS, dtype=torch.long), past_key_values=cache)
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    return sum(p.numel() for p in model.parameters()), kept


def _pair(answer: Answer, config: LlamaConfig, batch: int, seq_len: int, size: int) -> tuple[float, float]:
    value = without_labkit(lambda: answer(config, batch, seq_len, size), ("sizing", "roofline", "step_costs"))
    pair = isinstance(value, tuple | list) and len(value) == 2
    expect(pair, f"return two numbers, (weight_bytes, kv_bytes); got {value!r}")
    return as_number(value[0], "weight_bytes"), as_number(value[1], "kv_bytes")


def _difference(config: LlamaConfig, missing: float) -> str:
    """Which part of the model has as many elements as are missing (or too many, if negative)."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    parts = {
        "an embedding table: input and head are one when tied, two when not": config.vocab_size * hidden,
        "the norms: two of hidden_size in each layer, and one at the end": (2 * layers + 1) * hidden,
        "the final norm": hidden,
        "the two norms of each layer": 2 * layers * hidden,
        "one MLP matrix of each layer: there are gate, up and down": layers * hidden * config.intermediate_size,
        "k_proj and v_proj: num_key_value_heads * head_dim wide": 2 * layers * hidden * head_dim * (heads - kv_heads),
        "q_proj or o_proj of each layer: num_attention_heads * head_dim wide": layers * hidden * heads * head_dim,
    }
    name = next((part for part, size in parts.items() if size and near(abs(missing), size)), None)
    return f": the difference is {name}" if name else ""


def _test_scaling(answer: Answer) -> None:
    config = _config()
    weights, kv = _pair(answer, config, 1, 8, 2)
    wide = _pair(answer, config, 1, 8, 4)
    expect(
        near(wide[0], 2 * weights), "weights at 4 bytes an element should take twice those at 2: use bytes_per_element"
    )
    expect(near(wide[1], 2 * kv), "the cache at 4 bytes an element should take twice that at 2: use bytes_per_element")
    longer, more = _pair(answer, config, 1, 24, 2), _pair(answer, config, 3, 8, 2)
    expect(near(longer[1], 3 * kv), "the cache should grow with seq_len: three times the tokens, three times the bytes")
    expect(near(more[1], 3 * kv), "the cache should grow with batch: each sequence has its own")
    same = near(longer[0], weights) and near(more[0], weights)
    expect(same, "weight_bytes should not depend on batch or seq_len: all sequences share the weights")


def _test_cache(answer: Answer) -> None:
    grouped = {"num_key_value_heads": 1}
    full, fewer = (_pair(answer, _config(**c), 1, _TOKENS, 2)[1] for c in ({}, grouped))
    shrinks = (
        "GQA: with 1 KV head of 4, the cache should be a quarter; K and V are kept for num_key_value_heads heads only"
    )
    expect(near(fewer, full / 4), shrinks)
    long_heads = _pair(answer, _config(head_dim=32), 1, _TOKENS, 2)[1]
    reads = "head_dim is a field of its own: at head_dim 32 a cache should be twice that at 16, whatever hidden_size is"
    expect(near(long_heads, 2 * full), reads)
    target = 2 * _real_elements()[1]
    factors = {0.5: "K and V are both kept: a factor of 2", 1 / 3: "every layer keeps its own: num_hidden_layers"}
    why = next((f" ({text})" for factor, text in factors.items() if near(full / target, factor)), "")
    expect(near(full, target), f"a real cache of {_TOKENS} tokens holds {target:,} bytes; yours, {full:,.0f}{why}")


def _test_weights(answer: Answer) -> None:
    cases = {
        "untied": {},
        "tied": {"tie_word_embeddings": True},
        "with GQA": {"num_key_value_heads": 2},
        "with head_dim 32": {"head_dim": 32, "num_key_value_heads": 1},
    }
    for name, changes in cases.items():
        config, (target, _) = _config(**changes), _real_elements(**changes)
        found = _pair(answer, config, 1, 1, 2)[0] / 2
        why = _difference(config, target - found)
        message = f"a real model ({name}) has {target:,} parameters; yours would have {found:,.0f}{why}"
        expect(near(found, target, 1e-9), message)


def _test(function: object) -> str:
    answer = Answer(function, _SIGNATURE)
    _test_scaling(answer)
    _test_cache(answer)
    _test_weights(answer)
    return "weights and cache equal, to the byte, those of real models: MHA and GQA, tied and untied, any head_dim"


MODEL_MEMORY = Exercise(
    name="model_memory",
    chapter=1,
    task="The bytes of a model's weights and of its KV cache, from its config.",
    signature=_SIGNATURE,
    hints=(
        "List the tensors: the embedding; in each layer q, k, v, o, gate, up, down and two norms; a last norm; the "
        "head. The cache keeps K and V of every layer for every token.",
        "k_proj and v_proj have num_key_value_heads * head_dim outputs, q_proj num_attention_heads * head_dim, and "
        "o_proj as many inputs. With tie_word_embeddings the head is the embedding.",
        "kv_bytes = 2 * num_hidden_layers * num_key_value_heads * head_dim * batch * seq_len * bytes_per_element. A "
        "layer has hidden * (2 * q + 2 * kv + 3 * intermediate + 2) elements, with q and kv the widths of hint 2.",
    ),
    test=_test,
)
