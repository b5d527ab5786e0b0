"""LatentAttention: its two forms against each other, and against DeepSeek's layers in transformers."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from labkit.attention import LatentAttention
from tests.attention.watching import Made

SIZES = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "beta_fast": 32,
    "beta_slow": 1,
}


def module_of(q_lora_rank: int | None = None, **changes) -> LatentAttention:
    module = LatentAttention(40, 4, q_lora_rank=q_lora_rank, **(SIZES | changes)).double().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.5)
    return module


def deepseek(version: int, **changes):
    """A layer of transformers with random weights, and its rotary module."""
    modeling, config_class = {2: (v2, DeepseekV2Config), 3: (v3, DeepseekV3Config)}[version]
    fields = {"hidden_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 6, "q_lora_rank": None}
    config = config_class(**(fields | SIZES | changes))
    config._attn_implementation = "eager"
    layer = getattr(modeling, f"DeepseekV{version}Attention")(config, 0).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.5)
    return layer, getattr(modeling, f"DeepseekV{version}RotaryEmbedding")(config)


@pytest.mark.parametrize("q_lora_rank", [None, 9])
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("past", [0, 7])
def test_both_forms_agree_in_float64(q_lora_rank: int | None, q_len: int, past: int) -> None:
    module = module_of(q_lora_rank)
    x = torch.randn(2, past + q_len, 40, dtype=torch.float64)
    mask = torch.ones(2, past + q_len, dtype=torch.bool)
    mask[1, :3] = False
    for attention_mask in (None, mask):
        found = []
        for form in ("plain", "absorbed"):
            cache = DynamicCache()
            if past:
                seen = None if attention_mask is None else mask[:, :past]
                module(x[:, :past], past_key_values=cache, attention_mask=seen)
            found.append(module(x[:, past:], past_key_values=cache, attention_mask=attention_mask, form=form))
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
        assert not found[0].isnan().any()


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 1, 4], [1, 8]])
@pytest.mark.parametrize("form", ["auto", "plain", "absorbed"])
def test_incremental_equals_full(chunks: list[int], form: str) -> None:
    module, x, cache = module_of(9), torch.randn(2, 9, 40, dtype=torch.float64), DynamicCache()
    parts = [module(part, past_key_values=cache, form=form) for part in x.split(chunks, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, form="plain"), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", ["plain", "absorbed"])
@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (2, {}),
        (2, {"q_lora_rank": 9, "attention_bias": True}),
        (2, {"rope_parameters": YARN}),
        (3, {}),
        (3, {"q_lora_rank": 9, "rope_interleave": False}),
        (3, {"rope_parameters": YARN, "attention_bias": True}),
    ],
)
def test_weights_of_a_deepseek_layer_give_its_outputs(form: str, version: int, changes: dict) -> None:
    layer, rotary = deepseek(version, **changes)
    n = 50
    x = torch.randn(2, n, 40)
    mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
    turned = rotary(x, torch.arange(n)[None])
    expected = layer(x, attention_mask=mask, position_embeddings=turned)[0]
    module = LatentAttention.from_deepseek(layer, rotary)
    torch.testing.assert_close(module(x, form=form), expected, rtol=5e-4, atol=5e-5 * float(expected.abs().max()))
    cache = DynamicCache()
    parts = [module(part, past_key_values=cache, form=form) for part in x.split([20, 1, 1, 28], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=5e-4, atol=5e-5 * float(expected.abs().max()))


def test_bytes_a_token_in_the_cache() -> None:
    module, cache = module_of().float(), DynamicCache()
    module(torch.randn(3, 5, 40), past_key_values=cache)
    module(torch.randn(3, 1, 40), past_key_values=cache)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (cache.layers[0].keys, cache.layers[0].values)
    }
    per_token = sum(held.values()) / (3 * 6)
    assert per_token == 4 * module.cached_numbers_per_token() == 4 * (12 + 6)
    # The same heads with their own keys and values would take this much.
    assert per_token < 4 * 4 * (8 + 6 + 10) / 5


def test_the_absorbed_form_makes_no_head_its_own_keys() -> None:
    module = LatentAttention(64, 16, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    cache, past = DynamicCache(), 500
    module(torch.randn(1, past, 64), past_key_values=cache)
    largest = {}
    for form in ("absorbed", "plain", "auto"):
        with Made() as made:
            module(torch.randn(1, 1, 64), past_key_values=cache, form=form)
        largest[form] = made.largest
    assert largest["absorbed"] < 2 * past * 32 and largest["auto"] < 2 * past * 32
    assert largest["plain"] > 16 * past * 32


def test_auto_takes_the_form_that_multiplies_less() -> None:
    # The sizes of DeepSeek-V2: a rank of 512 for heads of 128.
    module = LatentAttention(
        64, 2, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, device="meta"
    )
    assert module.absorbed_is_cheaper(1, 4096) and not module.absorbed_is_cheaper(4096, 4096)


def test_padding_changes_no_other_row_and_a_blind_query_gives_zeros() -> None:
    module = module_of()
    long, short = torch.randn(1, 8, 40).double(), torch.randn(1, 5, 40).double()
    both = torch.cat((long, torch.cat((torch.randn(1, 3, 40).double(), short), 1)))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :3] = False
    for form in ("plain", "absorbed"):
        got = module(both, attention_mask=mask, form=form)
        torch.testing.assert_close(got[0], module(long)[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got[1, 3:], module(short)[0], rtol=1e-6, atol=1e-6)
        assert (got[1, :3] == 0).all()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: got 5"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: got 0"),
        ({"q_lora_rank": 0}, "q_lora_rank: got 0"),
        ({"v_head_dim": 1.5}, "v_head_dim: got 1.5"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LatentAttention(40, 4, **(SIZES | changes))


def test_wrong_forms_and_layers_are_refused() -> None:
    module = module_of()
    with pytest.raises(ValueError, match="form: got 'absorb'"):
        module(torch.randn(1, 2, 40).double(), form="absorb")
    with pytest.raises(ValueError, match="attention: got"):
        LatentAttention.from_deepseek(module, module.rotary)
