"""FLOPs, bytes and memory from a config, held against models that really run, and the roof above them."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from labkit._paths import DATA
from labkit.hardware import datasheet_by_name
from labkit.measure import peak_memory
from labkit.models import model_config
from labkit.roofline import (
    LINEAR_OPS,
    attainable_flops,
    batch_at_ridge,
    kv_bytes_per_token,
    memory_bytes,
    op_costs,
    parameter_count,
    ridge,
    time_floor,
    weight_bytes,
)

OPS = [
    "embed", "input_norm", "q_proj", "k_proj", "v_proj", "rope", "kv_write", "attention", "o_proj", "attn_residual",
    "post_norm", "gate_proj", "up_proj", "act_mul", "down_proj", "mlp_residual", "final_norm", "lm_head",
]  # fmt: skip
TINY = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}
MODELS = {
    "MHA": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=4)),
    "GQA": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=2, tie_word_embeddings=True)),
    "MQA": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=1, head_dim=24)),
    "biases": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=2, attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY, num_key_value_heads=2)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, num_key_value_heads=2, head_dim=32)),
}
STEPS = {"prefill": (2, 11, 11), "decode": (3, 1, 9), "chunk": (1, 4, 12)}
# Two CPU cores, as a Ceilings that measure_ceilings would return; only these two fields are read.
CPU = SimpleNamespace(read_bandwidth=8.5e9, matmul_flops={torch.float32: 59e9, torch.bfloat16: 70e9})


def _model(name: str):
    kind, config = MODELS[name]
    return kind(config).eval(), config


def _run_step(
    model, batch: int, q_len: int, kv_len: int, logits_to_keep: int = 0
) -> tuple[FlopCounterMode, DynamicCache]:
    """FLOPs by module of the last `q_len` of `kv_len` tokens, and the cache after them."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        if kv_len > q_len:
            model(torch.zeros(batch, kv_len - q_len, dtype=torch.long), past_key_values=cache)
        tokens = torch.zeros(batch, q_len, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, past_key_values=cache, logits_to_keep=logits_to_keep)
    return counter, cache


def _costs(config, step: str, dtype="float32", **more):
    batch, q_len, kv_len = STEPS[step]
    return {c.name: c for c in op_costs(config, batch=batch, q_len=q_len, kv_len=kv_len, dtype=dtype, **more)}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", MODELS)
def test_flops_agree_with_the_flop_counter(name, step):
    model, config = _model(name)
    counter, _ = _run_step(model, *STEPS[step])
    costs = _costs(config, step)
    assert list(costs) == OPS
    matmul = sum(c.matmul_flops for c in costs.values())
    assert matmul == pytest.approx(counter.get_total_flops(), rel=0.01)
    by_module = {module: sum(ops.values()) for module, ops in counter.get_flop_counts().items()}
    for op in LINEAR_OPS:
        counted = sum(flops for module, flops in by_module.items() if module.endswith(f".{op}"))
        assert costs[op].matmul_flops == counted, op
    outside = sum(by_module[m] for m in by_module if m.endswith("self_attn"))
    inside = sum(costs[op].matmul_flops for op in ("q_proj", "k_proj", "v_proj", "attention", "o_proj"))
    assert inside == pytest.approx(outside, rel=0.01)


@pytest.mark.parametrize("kept", [1, 4])
def test_flops_of_the_head_follow_logits_to_keep(kept):
    model, config = _model("GQA")
    counter, _ = _run_step(model, *STEPS["prefill"], logits_to_keep=kept)
    costs = _costs(config, "prefill", logits_to_keep=kept)
    assert sum(c.matmul_flops for c in costs.values()) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert costs["lm_head"].flops * STEPS["prefill"][1] == _costs(config, "prefill")["lm_head"].flops * kept


@pytest.mark.parametrize("name", MODELS)
def test_attention_counts_what_the_definition_multiplies(name):
    config = MODELS[name][1]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for batch, q_len, kv_len in STEPS.values():
        costs = {c.name: c for c in op_costs(config, batch=batch, q_len=q_len, kv_len=kv_len, dtype="float32")}
        q, k = (torch.empty(batch, 4, n, head_dim) for n in (q_len, kv_len))
        with FlopCounterMode(display=False) as counter:
            (q @ k.mT) @ k
        assert costs["attention"].matmul_flops == counter.get_total_flops() * config.num_hidden_layers


def test_elementwise_flops_are_a_small_and_separate_part_at_real_sizes():
    costs = op_costs(model_config("llama-3.1-8b"), batch=1, q_len=512, kv_len=512, dtype="bfloat16")
    matmul, flops = sum(c.matmul_flops for c in costs), sum(c.flops for c in costs)
    assert matmul < flops < 1.01 * matmul
    assert all(c.matmul_flops == 0 for c in costs if c.name not in (*LINEAR_OPS, "attention"))
    assert {c.name for c in costs if c.flops == 0} == {"embed", "kv_write"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_weight_bytes_are_those_of_the_real_parameters(name, dtype):
    model, config = _model(name)
    model.to(getattr(torch, dtype))
    real = {n: p.nbytes for n, p in model.named_parameters()}
    assert weight_bytes(config, dtype) == sum(real.values())
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    costs = _costs(config, "decode", dtype)
    for op in LINEAR_OPS[:-1]:
        assert costs[op].weight_bytes == sum(size for n, size in real.items() if f".{op}." in n), op
    norms = {
        "input_norm": "input_layernorm",
        "post_norm": "post_attention",
        "final_norm": "model.norm",
        "rope": "self_attn.",
    }
    for op, part in norms.items():
        assert costs[op].weight_bytes == sum(s for n, s in real.items() if part in n and n.endswith("norm.weight")), op
    assert costs["lm_head"].weight_bytes == model.lm_head.weight.nbytes
    assert costs["embed"].weight_bytes == STEPS["decode"][0] * model.model.embed_tokens.weight[0].nbytes


@pytest.mark.parametrize("name", MODELS)
def test_kv_bytes_are_those_of_the_real_cache(name):
    model, config = _model(name)
    for step, (batch, q_len, kv_len) in STEPS.items():
        _, cache = _run_step(model, batch, q_len, kv_len)
        real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert kv_bytes_per_token(config, "float32") * batch * kv_len == real
        assert memory_bytes(config, "float32", batch, kv_len).kv_cache == real
        costs = _costs(config, step)
        assert costs["attention"].kv_bytes == real
        assert costs["kv_write"].kv_bytes * kv_len == real * q_len
        assert {n for n, c in costs.items() if c.kv_bytes} == {"attention", "kv_write"}


def test_activation_bytes_are_each_input_and_output_once():
    """Against the tensors that go into and come out of each module of a real step."""
    model, config = _model("GQA")
    moved: dict[str, int] = {}

    def count(name):
        def hook(_, inputs, output):
            moved[name] = moved.get(name, 0) + sum(t.nbytes for t in (*inputs, output))

        return hook

    modules = {
        "embed_tokens": "embed",
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "post_norm",
        "norm": "final_norm",
    }
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name in modules or name in LINEAR_OPS:
            module.register_forward_hook(count(modules.get(name, name)))
    batch, q_len, _ = STEPS["prefill"]
    with torch.inference_mode():
        model(torch.zeros(batch, q_len, dtype=torch.long))
    costs = _costs(config, "prefill")
    assert {name: costs[name].activation_bytes for name in moved} == moved
    tokens, layers = batch * q_len, config.num_hidden_layers
    assert costs["act_mul"].activation_bytes == 3 * tokens * config.intermediate_size * 4 * layers
    assert costs["attn_residual"].activation_bytes == costs["mlp_residual"].activation_bytes
    assert costs["attn_residual"].activation_bytes == 3 * tokens * config.hidden_size * 4 * layers
    assert costs["attention"].activation_bytes == 2 * tokens * config.num_attention_heads * config.head_dim * 4 * layers
    assert costs["kv_write"].activation_bytes == costs["kv_write"].kv_bytes


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_memory_is_the_peak_of_a_real_prefill(name, dtype):
    kind, config = MODELS[name]
    config = type(config).from_dict(config.to_dict() | {"max_position_embeddings": 512, "intermediate_size": 384})
    config._attn_implementation = "sdpa"
    model = kind(config).to(getattr(torch, dtype)).eval()
    batch, seq_len = 2, 192
    tokens = torch.zeros(batch, seq_len, dtype=torch.long)

    @torch.inference_mode()
    def prefill():
        return model(tokens, past_key_values=DynamicCache(config=config), logits_to_keep=1)

    prefill()
    predicted = memory_bytes(config, dtype, batch, seq_len)
    real = peak_memory(prefill, device="cpu")
    assert predicted.total - predicted.weights == pytest.approx(real, rel=0.1)


def test_the_facts_that_the_course_quotes():
    gb = 1e9
    assert weight_bytes(model_config("llama-3.1-70b"), "float16") / gb == pytest.approx(140, rel=0.02)
    assert weight_bytes(model_config("llama-3.1-405b"), "float16") / gb == pytest.approx(810, rel=0.02)
    assert kv_bytes_per_token(model_config("llama-3.1-8b"), "bfloat16") == 131_072
    assert kv_bytes_per_token(model_config("llama-2-7b"), "float16") == 524_288
    step = op_costs(model_config("llama-3.1-8b"), batch=1, q_len=1, kv_len=1, dtype="bfloat16")
    assert sum(c.weight_bytes for c in step) / gb == pytest.approx(15.0, abs=0.05)
    flops = op_costs(model_config("llama-3.1-70b"), batch=1, q_len=1, kv_len=1, dtype="float16")
    assert sum(c.flops for c in flops) / 1e12 == pytest.approx(0.14, rel=0.02)


def test_decode_limits_of_an_h200():
    """320 tokens/s in bf16, 640 in int8, about 1240 in int4 g128 (4.125 bits): the bandwidth over the bytes read."""
    config, h200 = model_config("llama-3.1-8b"), datasheet_by_name("NVIDIA H200")
    costs = op_costs(config, batch=1, q_len=1, kv_len=1, dtype="bfloat16")
    weights = sum(c.weight_bytes for c in costs)
    assert h200.memory_bandwidth / weights == pytest.approx(320, rel=0.01)
    ceilings = SimpleNamespace(read_bandwidth=h200.memory_bandwidth, matmul_flops=h200.matmul_flops)
    assert 1 / time_floor(costs, ceilings, "bfloat16") == pytest.approx(320, rel=0.01)
    assert ridge(ceilings, torch.bfloat16) == pytest.approx(206, abs=1)
    per_weight = {"bfloat16": 2, "int8": 1, "uint4": 0.5}
    for dtype, size in per_weight.items():
        got = batch_at_ridge(config, ceilings, "bfloat16", weight_dtype=dtype)
        assert got is not None and got > ridge(ceilings, "bfloat16") * size / 2 > 0.4 * got


def test_weight_and_kv_dtypes_change_only_what_they_name():
    config = model_config("llama-3.1-8b")
    base, small, cache = (
        {c.name: c for c in op_costs(config, batch=2, q_len=1, kv_len=64, dtype="bfloat16", **more)}
        for more in ({}, {"weight_dtype": "uint4"}, {"kv_dtype": torch.float8_e4m3fn})
    )
    for name in OPS:
        in_layer = name in LINEAR_OPS and name != "lm_head"
        assert small[name] == replace(base[name], weight_bytes=base[name].weight_bytes // (4 if in_layer else 1))
        assert cache[name] == replace(base[name], kv_bytes=base[name].kv_bytes // 2)
    full, packed = weight_bytes(config, "bfloat16"), weight_bytes(config, "bfloat16", weight_dtype="int8")
    assert full - packed == sum(base[n].weight_bytes for n in LINEAR_OPS[:-1]) // 2
    sizes = {"float32": 32, "float8_e4m3fn": 8, "int8": 8, "uint4": 4, "int3": 3, "float4_e2m1fn_x2": 4}
    for dtype, bits in sizes.items():
        assert kv_bytes_per_token(config, dtype) == 65_536 * bits // 8
    memory = memory_bytes(config, "bfloat16", 2, 64, kv_dtype="int8", weight_dtype="int8", q_len=1, logits_to_keep=9)
    assert memory.weights == packed and memory.kv_cache == 2 * 64 * kv_bytes_per_token(config, "int8")
    assert memory.logits == 2 * config.vocab_size * 2
    assert memory.total == memory.weights + memory.kv_cache + memory.activations + memory.logits


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 64), q_len=st.integers(1, 64), past=st.integers(0, 512))
def test_costs_grow_as_they_must(batch, q_len, past):
    config, kv_len = MODELS["GQA"][1], q_len + past
    one = op_costs(config, batch=1, q_len=q_len, kv_len=kv_len, dtype="float32")
    many = op_costs(config, batch=batch, q_len=q_len, kv_len=kv_len, dtype="float32")
    for a, b in zip(one, many, strict=True):
        assert b.flops == batch * a.flops and b.kv_bytes == batch * a.kv_bytes
        assert b.weight_bytes == (batch if a.name == "embed" else 1) * a.weight_bytes
        assert a.activation_bytes <= b.activation_bytes <= batch * a.activation_bytes
        assert b.bytes == b.weight_bytes + b.kv_bytes + b.activation_bytes
        assert b.intensity == b.flops / b.bytes >= a.intensity * (1 - 1e-12)
        assert b.count == (1 if b.name in ("embed", "final_norm", "lm_head") else 3)


def test_the_roof():
    at = ridge(CPU, "float32")
    assert at == 59e9 / 8.5e9
    assert attainable_flops(at / 4, CPU, torch.float32) == pytest.approx(59e9 / 4)
    assert attainable_flops(at, CPU, torch.float32) == pytest.approx(59e9)
    assert attainable_flops(100 * at, CPU, torch.float32) == 59e9
    assert attainable_flops(0, CPU, "bfloat16") == 0
    decode = op_costs(model_config("smollm2-135m"), batch=1, q_len=1, kv_len=256, dtype="float32")
    assert time_floor(decode, CPU, "float32") == pytest.approx(sum(c.bytes for c in decode) / 8.5e9)
    head = decode[-1]
    assert time_floor(head, CPU, "float32") == time_floor([head], CPU, "float32") == head.bytes / 8.5e9
    prefill = op_costs(model_config("smollm2-135m"), batch=4, q_len=512, kv_len=512, dtype="float32")
    up = next(c for c in prefill if c.name == "up_proj")
    assert time_floor(up, CPU, "float32") == up.flops / 59e9 > up.bytes / 8.5e9
    assert up.flops / time_floor(up, CPU, "float32") == attainable_flops(up.intensity, CPU, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-8b"])
def test_batch_at_ridge_is_where_the_linear_layers_cross_it(name, dtype):
    config = model_config(name)

    def intensity(batch):
        costs = op_costs(config, batch=batch, q_len=1, kv_len=1, dtype=dtype)
        linear = [c for c in costs if c.name in LINEAR_OPS]
        return sum(c.flops for c in linear) / sum(c.bytes for c in linear)

    found = batch_at_ridge(config, CPU, dtype)
    assert intensity(found - 1) < ridge(CPU, dtype) <= intensity(found)
    never = SimpleNamespace(read_bandwidth=1e9, matmul_flops={getattr(torch, dtype): 1e16})
    assert batch_at_ridge(config, never, dtype) is None
    at_once = SimpleNamespace(read_bandwidth=1e12, matmul_flops={getattr(torch, dtype): 1e9})
    assert batch_at_ridge(config, at_once, dtype) == 1


CONFIG = MODELS["GQA"][1]
GOOD = {"batch": 1, "q_len": 2, "kv_len": 4, "dtype": "float32"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: op_costs(GPT2Config(), **GOOD), "config: got 'gpt2'; takes .*llama or qwen2 or qwen3"),
        (lambda: op_costs("llama-3.1-8b", **GOOD), "config: got 'str'"),
        (lambda: parameter_count(Qwen2Config(use_sliding_window=True)), "config: got .*sliding"),
        (lambda: op_costs(CONFIG, **(GOOD | {"batch": 0})), "batch: got 0; takes an integer of at least 1"),
        (lambda: op_costs(CONFIG, **(GOOD | {"batch": 1.5})), "batch: got 1.5"),
        (lambda: op_costs(CONFIG, **(GOOD | {"q_len": -1})), "q_len: got -1"),
        (lambda: op_costs(CONFIG, **(GOOD | {"kv_len": 1})), "kv_len: got 1; takes an integer of at least 2"),
        (lambda: op_costs(CONFIG, **(GOOD | {"dtype": "float31"})), "dtype: got 'float31'"),
        (lambda: op_costs(CONFIG, **(GOOD | {"dtype": 16})), "dtype: got 16"),
        (lambda: op_costs(CONFIG, **GOOD, weight_dtype="int9"), "weight_dtype: got 'int9'"),
        (lambda: op_costs(CONFIG, **GOOD, kv_dtype=4), "kv_dtype: got 4"),
        (lambda: op_costs(CONFIG, **GOOD, logits_to_keep=0), "logits_to_keep: got 0"),
        (lambda: memory_bytes(CONFIG, "float32", 1, 4, q_len=5), "q_len: got 5; takes an integer from 1 to 4"),
        (lambda: memory_bytes(CONFIG, "float32", 1, 0), "seq_len: got 0"),
        (lambda: ridge(CPU, "float16"), "dtype: got 'float16'; takes .*float32 or bfloat16"),
        (lambda: ridge({"read_bandwidth": 1}, "float16"), "ceilings: got 'dict'"),
        (lambda: attainable_flops(-1, CPU, "float32"), "intensity: got -1"),
        (lambda: attainable_flops(math.nan, CPU, "float32"), "intensity: got nan"),
        (lambda: time_floor([1.0], CPU, "float32"), "cost: got"),
        (lambda: time_floor(None, CPU, "float32"), "cost: got"),
        (lambda: ridge(CPU, ["float32"]), "dtype: got"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


GPUS = yaml.safe_load((DATA / "gpus.yaml").read_text(encoding="utf-8"))["gpus"]
SHARED = {"7.5": 64, "8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
DEVICE_NAMES = {
    "NVIDIA H200": "NVIDIA H200 SXM",
    "NVIDIA H100 80GB HBM3": "NVIDIA H100 SXM",
    "NVIDIA H100 PCIe": "NVIDIA H100 PCIe",
    "NVIDIA A100-SXM4-80GB": "NVIDIA A100 80GB SXM",
    "NVIDIA A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "NVIDIA A100-SXM4-40GB": "NVIDIA A100 40GB",
    "NVIDIA A100-PCIE-40GB": "NVIDIA A100 40GB",
    "NVIDIA L40S": "NVIDIA L40S",
    "NVIDIA L4": "NVIDIA L4",
    "NVIDIA A10": "NVIDIA A10",
    "Tesla T4": "NVIDIA T4",
    "NVIDIA GeForce RTX 3090": "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090": "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090": "NVIDIA GeForce RTX 5090",
    "NVIDIA RTX 6000 Ada Generation": "NVIDIA RTX 6000 Ada Generation",
    "NVIDIA B200": "NVIDIA B200",
}
OTHERS = [
    "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GH200 480GB", "NVIDIA H100 NVL", "NVIDIA A10G",
    "NVIDIA A100X", "NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "Quadro RTX 6000", "NVIDIA GB200", "NVIDIA RTX A6000", "",
]  # fmt: skip


@pytest.mark.parametrize(("device", "name"), DEVICE_NAMES.items())
def test_each_card_is_known_by_the_name_that_torch_gives(device, name):
    matching = [gpu["name"] for gpu in GPUS if any(re.search(p, device) for p in gpu["match"])]
    assert matching == [name]
    assert datasheet_by_name(device).name == name


def test_every_listed_card_is_reached_and_others_are_not():
    assert {gpu["name"] for gpu in GPUS} == set(DEVICE_NAMES.values())
    assert [name for name in OTHERS if datasheet_by_name(name)] == []


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu["name"])
def test_datasheets_are_consistent(gpu):
    flops = gpu["matmul_flops"]
    assert all(isinstance(value, float) for value in (*flops.values(), gpu["memory_bandwidth"]))
    assert all(hasattr(torch, name) for name in flops if name != "tf32")
    assert gpu["source"] and set(gpu["unconfirmed"]) <= {*gpu, *flops}
    assert flops["int8"] >= flops["float16"] > flops["float32"]
    # Dense rates halve with each doubling of the width; a sparse figure taken by mistake would break this.
    steps = [("float8_e4m3fn", "float16"), ("float16", "tf32"), ("float16", "bfloat16")]
    expected = {"float8_e4m3fn": 2, "tf32": 2, "bfloat16": 1}
    for wide, narrow in steps:
        if wide in flops and narrow in flops:
            factor = expected[wide if narrow == "float16" else narrow]
            assert flops[wide] / flops[narrow] == pytest.approx(factor, rel=0.05)
    assert gpu["shared_memory_bytes"] == SHARED[gpu["compute_capability"]] * 1024
    assert gpu["memory_bytes"] % 2**30 == 0 and 16 <= gpu["memory_bytes"] / 2**30 <= 192
    assert gpu["l2_bytes"] % 2**20 == 0
    assert ("bfloat16" in flops) == (gpu["compute_capability"] >= "8" or gpu["compute_capability"] in ("10.0", "12.0"))
