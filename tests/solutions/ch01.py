"""Chapter 01's solutions, and wrong answers that learners give, as the text of the cells tagged `exercise:<name>`.

SOLUTIONS[name] replaces the tagged cell when the chapter is run with its solutions; STUBS[name] is an untouched one.
WRONG[name] holds pairs: a cell's text, and a phrase that the check's message must contain, naming what failed.
ANSWERS[name] is what is passed to `check`, as in the notebook's next cell, with `measured` made by `measured_decode`.
"""

ANSWERS: dict[str, str] = {
    "model_memory": "model_memory",
    "tokens_per_second": "(tokens_per_second, measured)",
    "memory_bound_batch": "memory_bound_batch",
    "fixed_benchmark": "fixed_benchmark",
}

STUBS: dict[str, str] = {
    "model_memory": """
def model_memory(config, batch, seq_len, bytes_per_element):
    ...  # return (weight_bytes, kv_bytes)
""",
    "tokens_per_second": """
def tokens_per_second(config, context, bytes_per_element, bandwidth):
    raise NotImplementedError
""",
    "memory_bound_batch": """
def memory_bound_batch(matmul_flops, read_bandwidth, bytes_per_weight):
    return ...
""",
    "fixed_benchmark": """
fixed_benchmark = None
""",
}

SOLUTIONS: dict[str, str] = {
    "model_memory": """
def model_memory(config, batch, seq_len, bytes_per_element):
    hidden = config.hidden_size
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = hidden * (2 * q + 2 * kv + 3 * config.intermediate_size + 2)
    tables = 1 if config.tie_word_embeddings else 2
    weights = config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden
    cache = 2 * config.num_hidden_layers * kv * batch * seq_len
    return weights * bytes_per_element, cache * bytes_per_element
""",
    "tokens_per_second": """
def tokens_per_second(config, context, bytes_per_element, bandwidth):
    hidden, layers = config.hidden_size, config.num_hidden_layers
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    matrices = layers * hidden * (2 * q + 2 * kv + 3 * config.intermediate_size)
    read = matrices + config.vocab_size * hidden + 2 * layers * kv * context
    return bandwidth / (read * bytes_per_element)
""",
    "memory_bound_batch": """
import math

def memory_bound_batch(matmul_flops, read_bandwidth, bytes_per_weight):
    return max(1, math.ceil(matmul_flops / read_bandwidth * bytes_per_weight / 2))
""",
    "fixed_benchmark": """
def fixed_benchmark(generate, prompts, max_new_tokens, clock):
    start, made = clock(), 0
    for prompt in prompts:
        made += len(generate(prompt, max_new_tokens)) - len(prompt)
    return made / (clock() - start)
""",
}


def _changed(name: str, *changes: tuple[str, str]) -> str:
    """The solution with its right lines made wrong."""
    text = SOLUTIONS[name]
    for right, wrong in changes:
        assert right in text, right
        text = text.replace(right, wrong)
    return text


_BUGGY_BENCHMARK = """
def fixed_benchmark(generate, prompts, max_new_tokens, clock):
    start = clock()
    for prompt in prompts:
        generate(prompt, max_new_tokens)
    return len(prompts) * max_new_tokens / (clock() - start)
"""

_MEAN_OF_RATES = """
def fixed_benchmark(generate, prompts, max_new_tokens, clock):
    rates = []
    for prompt in prompts:
        start = clock()
        made = len(generate(prompt, max_new_tokens)) - len(prompt)
        rates.append(made / (clock() - start))
    return sum(rates) / len(rates)
"""

WRONG: dict[str, list[tuple[str, str]]] = {
    "model_memory": [
        (
            _changed(
                "model_memory",
                ("cache = 2 * config.num_hidden_layers * kv", "cache = 2 * config.num_hidden_layers * q"),
            ),
            "GQA",
        ),
        (_changed("model_memory", ("2 * q + 2 * kv", "4 * q")), "k_proj and v_proj"),
        (_changed("model_memory", ("tables = 1 if config.tie_word_embeddings else 2", "tables = 2")), "(tied)"),
        (
            _changed("model_memory", ("tables = 1 if config.tie_word_embeddings else 2", "tables = 1")),
            "(untied)",
        ),
        (_changed("model_memory", ("intermediate_size + 2)", "intermediate_size)")), "the two norms of each layer"),
        (_changed("model_memory", ("* hidden + hidden", "* hidden")), "the final norm"),
        (
            _changed("model_memory", ("3 * config.intermediate_size", "2 * config.intermediate_size")),
            "gate, up and down",
        ),
        (_changed("model_memory", ("cache = 2 * config", "cache = config")), "K and V are both kept"),
        (
            _changed("model_memory", ("cache = 2 * config.num_hidden_layers * kv", "cache = 2 * kv")),
            "num_hidden_layers",
        ),
        (_changed("model_memory", ("* batch * seq_len", "* seq_len")), "grow with batch"),
        (_changed("model_memory", ("* batch * seq_len", "* batch")), "grow with seq_len"),
        (
            _changed("model_memory", ("config.head_dim", "(config.hidden_size // config.num_attention_heads)")),
            "head_dim is a field of its own",
        ),
        (
            _changed(
                "model_memory", ("weights * bytes_per_element, cache * bytes_per_element", "2 * weights, 2 * cache")
            ),
            "bytes_per_element",
        ),
        (
            _changed("model_memory", ("weights * bytes_per_element", "(weights + cache) * bytes_per_element")),
            "share the weights",
        ),
        (
            _changed("model_memory", ("return weights * bytes_per_element, cache", "return weights + cache")),
            "two numbers",
        ),
        (
            """
from labkit.roofline import kv_bytes_per_token, weight_bytes

def model_memory(config, batch, seq_len, bytes_per_element):
    import torch
    dtype = {2: torch.bfloat16, 4: torch.float32}[bytes_per_element]
    return weight_bytes(config, dtype), batch * seq_len * kv_bytes_per_token(config, dtype)
""",
            "write it yourself: your function called labkit's own weight_bytes",
        ),
    ],
    "tokens_per_second": [
        (_changed("tokens_per_second", ("+ 2 * layers * kv * context", "")), "longer context"),
        (_changed("tokens_per_second", ("2 * layers * kv * context", "2 * layers * q * context")), "GQA"),
        (_changed("tokens_per_second", ("+ 2 * layers * kv", "+ layers * kv")), "elements of K and V"),
        (
            _changed(
                "tokens_per_second",
                (
                    "matrices + config",
                    "matrices + (not config.tie_word_embeddings) * config.vocab_size * hidden + config",
                ),
            ),
            "one row of the input embedding",
        ),
        (_changed("tokens_per_second", ("matrices + config.vocab_size * hidden", "matrices")), "reads the head"),
        (
            _changed(
                "tokens_per_second",
                (
                    "matrices + config.vocab_size * hidden",
                    "matrices + (not config.tie_word_embeddings) * config.vocab_size * hidden",
                ),
            ),
            "a tied model's step reads the head",
        ),
        (_changed("tokens_per_second", ("read * bytes_per_element", "read * 2")), "half the bytes an element"),
        (_changed("tokens_per_second", ("bandwidth / (", "1e9 / (")), "twice the bandwidth"),
        (_changed("tokens_per_second", ("2 * q + 2 * kv", "2 * q")), "elements; yours"),
        (_changed("tokens_per_second", ("return bandwidth", "return 0 * bandwidth")), "positive"),
    ],
    "memory_bound_batch": [
        (_changed("memory_bound_batch", (" / 2)", ")")), "two FLOPs"),
        (_changed("memory_bound_batch", (" * bytes_per_weight / 2", "")), "bytes_per_weight"),
        (_changed("memory_bound_batch", ("math.ceil", "")), "whole number"),
        (_changed("memory_bound_batch", ("math.ceil", "math.floor")), "still memory-bound"),
        (_changed("memory_bound_batch", ("math.ceil(", "1 + math.ceil(")), "a smaller batch would do"),
        (
            """
from types import SimpleNamespace

import torch
from transformers import LlamaConfig

from labkit import roofline

def memory_bound_batch(matmul_flops, read_bandwidth, bytes_per_weight):
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[bytes_per_weight]
    ceilings = SimpleNamespace(matmul_flops={dtype: matmul_flops}, read_bandwidth=read_bandwidth)
    return roofline.batch_at_ridge(LlamaConfig(), ceilings, dtype)
""",
            "write it yourself: your function called labkit's own batch_at_ridge",
        ),
    ],
    "fixed_benchmark": [
        (_BUGGY_BENCHMARK, "when runs stop early at EOS: 12 tokens in 6 s"),
        (_changed("fixed_benchmark", (" - len(prompt)", "")), "the prompts' tokens with the new ones"),
        (_MEAN_OF_RATES, "not the mean"),
        (
            _changed(
                "fixed_benchmark",
                (
                    "made += len(generate(prompt, max_new_tokens)) - len(prompt)",
                    "made = len(generate(prompt, max_new_tokens)) - len(prompt)",
                ),
            ),
            "when every run makes all its tokens",
        ),
        (
            _changed(
                "fixed_benchmark",
                ("len(generate(prompt, max_new_tokens))", "sum(t != 0 for t in generate(prompt, max_new_tokens))"),
            ),
            "EOS",
        ),
        (
            _changed("fixed_benchmark", ("clock()", "time.perf_counter()"), ("def fixed", "import time\n\ndef fixed")),
            "the clock that it is given",
        ),
        (
            _changed("fixed_benchmark", ("generate(prompt, max_new_tokens)", "generate(prompt, 2 * max_new_tokens)")),
            "call generate",
        ),
    ],
}
