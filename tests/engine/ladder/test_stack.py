"""One model with rungs on: the same words where rungs promise them, fewer bytes where they save them."""

import pytest
import torch

from labkit.engine import Decoder
from labkit.engine.cache import StaticKVCache
from labkit.engine.ladder import RUNGS, Stack, StackModels, WeightForm
from labkit.engine.ladder.attention import StandardAttentionCache
from labkit.measure import peak_memory
from labkit.models import tiny_model
from labkit.quantization import QuantLinear, RTNConfig
from labkit.speculative import PromptLookup

NEW = 12


@pytest.fixture(scope="module")
def models():
    return StackModels(tiny_model())


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(256, (1, 20), generator=torch.Generator().manual_seed(1))


def stack(models, *rungs):
    return Stack(models, rungs, proposer=PromptLookup())


def test_rungs_that_change_no_number_say_the_same(models, prompt):
    wanted = stack(models).generate(prompt, max_new_tokens=NEW).sequences
    assert wanted.shape == (1, 20 + NEW)
    for rungs in (("attention",), ("step",), ("step", "attention"), ("step", "attention", "speculation")):
        assert torch.equal(stack(models, *rungs).generate(prompt, max_new_tokens=NEW).sequences, wanted), rungs


def test_a_models_own_settings_for_generation_change_nothing(prompt):
    model = tiny_model()
    plain = stack(StackModels(model), "step").generate(prompt, max_new_tokens=NEW).sequences
    second = int(plain[0, prompt.shape[1] + 1])
    model.generation_config.eos_token_id, model.generation_config.suppress_tokens = second, [int(plain[0, -1])]
    model.generation_config.no_repeat_ngram_size = 1
    for rungs in ((), ("step",)):
        assert torch.equal(stack(StackModels(model), *rungs).generate(prompt, max_new_tokens=NEW).sequences, plain)
    assert model.generation_config.eos_token_id == second, "the model that was given keeps its own"


def test_a_model_in_training_mode_is_measured_without_its_dropout(prompt):
    model = tiny_model(attention_dropout=0.5).train()
    texts = [Stack(StackModels(model), ()).generate(prompt, max_new_tokens=8).sequences.tolist() for _ in range(2)]
    assert texts == [Stack(StackModels(model), ("step",)).generate(prompt, max_new_tokens=8).sequences.tolist()] * 2
    assert model.training


@pytest.mark.parametrize("rungs", [(), ("step",)])
def test_ids_and_lengths_are_held_against_the_model(models, prompt, rungs):
    stack = Stack(models, rungs)
    for wrong in (prompt + 10**6, prompt - 10**6, prompt.float(), prompt[0], prompt[:, :0], prompt.tolist()):
        with pytest.raises(ValueError, match="^input_ids: got"):
            stack.generate(wrong, max_new_tokens=2)
    with pytest.raises(ValueError, match="^max_new_tokens: got"):
        stack.generate(prompt, max_new_tokens=models.loaded.config.max_position_embeddings)


def test_the_source_is_left_as_it_was(models, prompt):
    before = {name: p.clone() for name, p in models.loaded.named_parameters()}
    stack(models, "step", "bfloat16", "int4", "int8_head").generate(prompt, max_new_tokens=2)
    assert all(torch.equal(before[name], p) for name, p in models.loaded.named_parameters())
    assert models.loaded.dtype is torch.float32 and not any(isinstance(m, QuantLinear) for m in models.loaded.modules())


def test_bytes_fall_with_the_bits(models):
    sizes = [
        stack(models, *rungs).weight_bytes for rungs in ((), ("bfloat16",), ("bfloat16", "int8"), ("bfloat16", "int4"))
    ]
    assert sizes[1] * 2 == sizes[0]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4


def test_a_packed_head_is_read_in_fewer_bytes(models):
    plain, packed = stack(models, "bfloat16", "int4"), stack(models, "bfloat16", "int4", "int8_head")
    head = models.loaded.lm_head.weight.numel()
    # Two bytes a weight become one, and a scale and a zero point a group.
    assert 0.4 * head < plain.step_bytes(1) - packed.step_bytes(1) < head


def test_a_quantized_cache_holds_its_bits(models):
    full, packed = stack(models, "bfloat16"), stack(models, "bfloat16", "quantized_kv")
    # 8 bits, and scale and minimum of 16 each for a head's 16 channels.
    assert packed.kv_bytes / full.kv_bytes == pytest.approx((8 + 2) / 16)
    assert full.kv_bytes == 2 * 2 * 2 * 16 * 2
    assert full.step_bytes(200) - full.step_bytes(100) == 100 * full.kv_bytes


def test_peak_memory_is_the_weights_and_what_a_run_adds(models):
    long = torch.randint(256, (1, 250), generator=torch.Generator().manual_seed(6))
    small, large = (stack(models, "step", "attention").peak_bytes(long[:, :n], max_new_tokens=2) for n in (20, 250))
    weights = stack(models).weight_bytes
    assert weights < small < large < 3 * weights


def test_peak_memory_counts_the_cache_for_every_token_that_is_made(models):
    ids = torch.randint(256, (1, 250), generator=torch.Generator().manual_seed(7))
    few, many = (stack(models, "step", "attention").peak_bytes(ids, max_new_tokens=n) for n in (2, 64))
    # 250 and 2 tokens fit into the first 256 slots, 314 take the next 256.
    assert many - few >= 256 * stack(models).kv_bytes


def test_the_last_tokens_logits_take_no_copy_of_the_head():
    """A 16-bit product on a CPU copies its weight first where its input has the strides of a longer one."""
    model = tiny_model(vocab_size=20_000).to(torch.bfloat16)
    decoder, ids = Decoder(model), torch.arange(40)[None]
    decoder.forward(ids, logits_to_keep=1)

    def prefill():
        decoder.reset()
        decoder.forward(ids, logits_to_keep=1)

    assert peak_memory(prefill) < model.lm_head.weight.nbytes / 2


def test_standard_attention_repeats_no_keys(models):
    model = tiny_model(num_attention_heads=8, num_key_value_heads=1, hidden_size=512, max_position_embeddings=2048)
    cache = StandardAttentionCache(model.config, 1, 2048, dtype=torch.float32, device=torch.device("cpu"))
    decoder = Decoder(model, cache=cache)
    decoder.fill_cache(1, 2000)
    token = torch.tensor([[5]])

    def step():
        decoder.forward(token)
        decoder.crop(2000)

    step()
    keys_of_a_layer = cache.keys[0].nbytes
    assert peak_memory(step) < keys_of_a_layer


def test_scores_in_memory_show_at_a_long_prompt(models):
    long = torch.randint(256, (1, 500), generator=torch.Generator().manual_seed(2))
    with_scores, without = (
        stack(models, *r).peak_bytes(long, max_new_tokens=2) for r in (["step"], ["step", "attention"])
    )
    # 4 heads' scores, 500 by 500 in float32: one copy at least.
    assert with_scores - without >= 4 * 500 * 500 * 4


def test_perplexity_is_that_of_the_weights_and_the_cache(models):
    ids = torch.randint(256, (96,), generator=torch.Generator().manual_seed(3))
    plain = stack(models).perplexity(ids, 48)
    assert stack(models, "step", "attention", "speculation").perplexity(ids, 48) == plain
    assert stack(models, "int4").perplexity(ids, 48) != plain
    assert stack(models, "quantized_kv").perplexity(ids, 48) != plain


def test_speculation_counts(models):
    repeating = torch.tensor([[1, 2, 3, 4] * 6])
    run = stack(models, "step", "attention", "speculation").generate(repeating, max_new_tokens=NEW)
    assert run.stats.n_emitted == NEW - 1 and run.stats.n_drafted > 0
    assert stack(models, "step").generate(repeating, max_new_tokens=2).stats is None


def test_times_are_of_the_run(models, prompt):
    for rungs in ((), ("step",)):
        run = stack(models, *rungs).generate(prompt, max_new_tokens=NEW)
        assert 0 < run.ttft_s < 30 and 0 < run.tpot_s < 30


def test_configs_choose_the_method(prompt):
    coarse = StackModels(tiny_model(), configs={4: RTNConfig(bits=4, group_size=-1)})
    assert coarse.model(WeightForm(torch.float32, 4)).model.layers[0].mlp.down_proj.weight.group_size == 128
    with pytest.raises(ValueError, match=r"configs\[4\]"):
        StackModels(tiny_model(), configs={4: RTNConfig(bits=8)})


@pytest.mark.parametrize("wrong", [None, "smollm2-135m", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(ValueError, match="model: got"):
        StackModels(wrong)


def test_a_model_that_is_packed_already_is_refused(models):
    with pytest.raises(ValueError, match="not quantized yet"):
        StackModels(models.model(WeightForm(torch.float32, 4)))


def test_rungs_that_do_not_go_together_are_refused(models):
    with pytest.raises(ValueError, match="4 bits already"):
        Stack(models, ["int4", "int8"])
    with pytest.raises(ValueError, match="nothing drafts"):
        Stack(models, ["step", "speculation"])


@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("ragged", [False, True])
def test_standard_attention_is_attention(q_len, ragged):
    model = tiny_model()
    prompt = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(4))
    more = torch.randint(256, (2, q_len), generator=torch.Generator().manual_seed(5))
    found = []
    for kind in (StaticKVCache, StandardAttentionCache):
        cache = kind(model.config, 2, 8, dtype=torch.float32, device=torch.device("cpu"))
        decoder = Decoder(model, cache=cache)
        decoder.forward(prompt)
        if ragged:
            decoder.crop([30, 17])
        found.append(decoder.forward(more))
        assert type(decoder.cache) is kind  # it grew, and stayed what it is
    assert torch.allclose(*found, atol=1e-5)


def test_standard_attention_keeps_a_tree_apart():
    model, mask = tiny_model(), torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    found = []
    for kind in (StaticKVCache, StandardAttentionCache):
        decoder = Decoder(model, cache=kind(model.config, 1, 8, dtype=torch.float32, device=torch.device("cpu")))
        decoder.forward(torch.arange(9)[None])
        found.append(decoder.forward(torch.tensor([[5, 6, 7]]), tree_mask=mask))
    assert torch.allclose(*found, atol=1e-5)


def test_every_rung_says_what_it_is_for():
    assert all(rung.does and rung.attacks and 1 <= rung.chapter <= 5 for rung in RUNGS.values())
