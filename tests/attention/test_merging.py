"""Merging the KV heads of a model: what leaves it unchanged, what it costs, what it saves, what it refuses."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, Qwen2Config, Qwen3Config

from labkit.attention import _merge_walk as walk
from labkit.attention import merge_kv_heads_, merging
from labkit.engine import Decoder
from labkit.models import shared_copy, tiny_model
from labkit.quality import kl_divergence
from labkit.quantization import RTNConfig, quantize_

IDS = torch.randint(0, 256, (6, 40), generator=torch.Generator().manual_seed(1))


def model_of(**changes) -> LlamaForCausalLM:
    return tiny_model(**({"num_key_value_heads": 4} | changes))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def head(linear, index: int) -> torch.Tensor:
    """The rows of one KV head, to be written to."""
    return linear.weight.data.unflatten(0, (-1, 16))[index]


def layers_of(model) -> list:
    return [layer.self_attn for layer in model.model.layers]


def test_equal_heads_are_merged_by_their_mean_without_a_change() -> None:
    model = model_of()
    for attention in layers_of(model):
        for linear in (attention.k_proj, attention.v_proj):
            head(linear, 1).copy_(head(linear, 0))
            head(linear, 3).copy_(head(linear, 2))
    before = logits(model)
    merge_kv_heads_(model, 2)
    torch.testing.assert_close(logits(model), before)


@pytest.mark.parametrize("slow_turn", [0.0, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_that_differ_by_what_can_be_absorbed_are_merged_without_a_change(slow_turn: float, bias: bool) -> None:
    """Keys by a complex number for each frequency, values by any matrix; and mean pooling does change them."""
    model = model_of(attention_bias=bias)
    for attention in layers_of(model):
        if bias:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(attention, name).bias.data.normal_()
        weights = [
            torch.cat((p.weight, p.bias[:, None]), 1) if bias else p.weight
            for p in (attention.k_proj, attention.v_proj)
        ]
        keys, values = (w.unflatten(0, (4, 16)) for w in weights)
        for other in range(1, 4):
            factor = torch.polar(torch.rand(8) + 0.5, 6 * torch.rand(8))[:, None]
            turned = torch.complex(keys[0, :8], keys[0, 8:]) * factor
            for linear, rows in (
                (attention.k_proj, torch.cat((turned.real, turned.imag))),
                (attention.v_proj, torch.randn(16, 16) @ values[0]),
            ):
                head(linear, other).copy_(rows[:, :64])
                if bias:
                    linear.bias.data.unflatten(0, (4, 16))[other] = rows[:, 64]
    before, pooled = logits(model), copy.deepcopy(model)
    report = merge_kv_heads_(model, 1, calibration=IDS, slow_turn=slow_turn)
    torch.testing.assert_close(logits(model), before, rtol=1e-2, atol=2e-2)
    assert max(report.layer_errors) < 1e-6
    merge_kv_heads_(pooled, 1)
    assert (logits(pooled) - before).abs().mean() > 0.2


@pytest.mark.parametrize(("heads", "bias"), [(1, False), (2, False), (1, True)])
def test_mean_pooling_by_hand(heads: int, bias: bool) -> None:
    model = model_of(attention_bias=bias)
    if bias:
        for attention in layers_of(model):
            attention.k_proj.bias.data.normal_(), attention.v_proj.bias.data.normal_()
    by_hand = tiny_model(num_key_value_heads=heads, attention_bias=bias)
    weights = model.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            old = weight.split(16)
            new = [torch.stack(old[g * 4 // heads : (g + 1) * 4 // heads]).mean(0) for g in range(heads)]
            weights[name] = torch.cat(new)
    by_hand.load_state_dict(weights)
    merge_kv_heads_(model, heads)
    torch.testing.assert_close(logits(model), logits(by_hand))


@pytest.mark.parametrize("calibration", [None, IDS])
def test_matrices_cache_and_config_shrink_and_everything_runs(calibration) -> None:
    model = model_of()
    sizes = [sum(p.numel() for p in model.parameters())]
    report = merge_kv_heads_(model, 1, calibration=calibration)
    sizes.append(sum(p.numel() for p in model.parameters()))
    for attention in layers_of(model):
        assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (16, 64)
        assert attention.num_key_value_groups == 4
        storage = attention.k_proj.weight.untyped_storage()
        assert storage.nbytes() == 16 * 64 * 4, "a view would keep the old matrix alive"
    assert sizes[0] - sizes[1] == 2 * 2 * 48 * 64
    assert model.config.num_key_value_heads == 1
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == IDS.numel() * report.bytes_per_token
    assert report.bytes_per_token_before == 4 * report.bytes_per_token
    expected = model.generate(IDS[:, :9], max_new_tokens=12, do_sample=False)
    assert Decoder(model).generate(IDS[:, :9], max_new_tokens=12).sequences.tolist() == expected.tolist()


def test_a_saved_merged_model_loads_again(tmp_path) -> None:
    model = model_of()
    merge_kv_heads_(model, 2, calibration=IDS)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(model))


def test_calibration_loses_less_than_the_mean_and_a_fit_less_than_that() -> None:
    model = model_of(max_position_embeddings=64)
    lost, errors = {}, {}
    for name, options in {
        "mean": {},
        "closed": {"calibration": IDS},
        "fitted": {"calibration": IDS, "fit_steps": 60, "learning_rate": 3e-3},
    }.items():
        merged = shared_copy(model)
        errors[name] = merge_kv_heads_(merged, 2, **options).layer_errors
        lost[name] = kl_divergence(logits(model), logits(merged))
    assert lost["closed"] < 0.8 * lost["mean"], lost
    assert lost["fitted"] < 0.9 * lost["closed"], lost
    assert sum(errors["fitted"]) < sum(errors["closed"])


def attended(model) -> list[torch.Tensor]:
    """What each layer's attention adds, in a pass of the whole model."""
    found = []
    hooks = [a.register_forward_hook(lambda module, args, out: found.append(out[0])) for a in layers_of(model)]
    logits(model)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("fit_steps", [0, 5])
def test_the_errors_reported_are_those_of_the_merged_model_as_it_runs(fit_steps: int) -> None:
    """Each layer's, on what the merged layers before it give, against what the original's attention gives."""
    model = model_of(num_hidden_layers=3)
    merged = shared_copy(model)
    report = merge_kv_heads_(merged, 1, calibration=IDS, fit_steps=fit_steps)
    pairs = zip(attended(model), attended(merged), strict=True)
    errors = [((new - old).square().mean() / old.square().mean()).item() for old, new in pairs]
    assert report.layer_errors == pytest.approx(errors, rel=1e-3)
    assert report.method == ("fitted" if fit_steps else "calibrated")


def test_solving_for_the_output_again_lowers_the_error() -> None:
    model = model_of(num_hidden_layers=1)
    solved, held = (
        merge_kv_heads_(shared_copy(model), 1, calibration=IDS, ridge=ridge).layer_errors[0] for ridge in (0.1, 1e9)
    )
    assert solved < 0.9 * held


def test_slow_pairs_merged_together_lose_less() -> None:
    """Frequencies so low that nothing turns: any mixture of channels commutes, and one of each kind does not do."""
    model = model_of(rope_parameters={"rope_type": "linear", "factor": 1e6, "rope_theta": 10000.0})
    lost = []
    for slow_turn in (0.0, 1.0):
        merged = shared_copy(model)
        merge_kv_heads_(merged, 2, calibration=IDS, slow_turn=slow_turn, merge="keys")
        lost.append(kl_divergence(logits(model), logits(merged)))
    assert lost[1] < 0.8 * lost[0], lost


@pytest.mark.parametrize("calibration", [None, IDS])
@pytest.mark.parametrize(("merge", "kept"), [("keys", "v_proj"), ("values", "k_proj")])
def test_keys_and_values_apart_keep_copies_and_save_nothing(calibration, merge: str, kept: str) -> None:
    model = model_of()
    before = copy.deepcopy(model)
    report = merge_kv_heads_(model, 2, calibration=calibration, merge=merge)
    assert report.bytes_per_token == report.bytes_per_token_before
    assert model.config.num_key_value_heads == 4
    merged = {"v_proj": "k_proj", "k_proj": "v_proj"}[kept]
    for attention, old in zip(layers_of(model), layers_of(before), strict=True):
        torch.testing.assert_close(getattr(attention, kept).weight, getattr(old, kept).weight)
        heads = getattr(attention, merged).weight.unflatten(0, (4, 16))
        torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=0)
        torch.testing.assert_close(heads[2], heads[3], rtol=0, atol=0)
        assert not torch.allclose(heads[0], heads[2])
    assert kl_divergence(logits(before), logits(model)) > 1e-3


def test_keys_and_values_of_the_mean_are_those_of_both() -> None:
    """One after the other leaves the very function that merging both at once does."""
    both, apart = model_of(), model_of()
    merge_kv_heads_(both, 1)
    merge_kv_heads_(apart, 1, merge="keys")
    merge_kv_heads_(apart, 1, merge="values")
    torch.testing.assert_close(logits(apart), logits(both))


def test_a_shared_copy_leaves_its_original_alone() -> None:
    model = model_of()
    before, config = logits(model), model.config.num_key_value_heads
    merged = shared_copy(model)
    merge_kv_heads_(merged, 1, calibration=IDS, fit_steps=2)
    assert torch.equal(logits(model), before) and model.config.num_key_value_heads == config
    assert not any(parameter.requires_grad for parameter in merged.parameters())


@pytest.mark.parametrize("options", [{}, {"fit_steps": 2, "learning_rate": 1e-3}])
def test_inference_mode_around_a_merge_changes_nothing(options: dict) -> None:
    calibration = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))
    plain, inside = tiny_model(), tiny_model()
    options = {"progress": False, "calibration": calibration, **options}
    merge_kv_heads_(plain, 1, **options)
    with torch.inference_mode():
        merge_kv_heads_(inside, 1, **options)
    for ours, theirs in zip(inside.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and not ours.is_inference()


def test_a_model_in_16_bits_stays_one() -> None:
    model = model_of().to(torch.bfloat16)
    exact = model_of()
    report = merge_kv_heads_(model, 2, calibration=IDS)
    merge_kv_heads_(exact, 2, calibration=IDS)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert report.bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert kl_divergence(logits(exact), logits(model).float()) < 0.1


def test_qwen2_has_biases_and_qwen3_norms() -> None:
    fields = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=256)
    fields |= dict(intermediate_size=96, initializer_range=0.2, head_dim=16)
    qwen2 = AutoModelForCausalLM.from_config(Qwen2Config(**fields)).eval()
    merge_kv_heads_(qwen2, 2, calibration=IDS)
    assert qwen2.model.layers[0].self_attn.k_proj.bias.shape == (32,)
    assert not logits(qwen2).isnan().any()
    qwen3 = AutoModelForCausalLM.from_config(Qwen3Config(**fields)).eval()
    with pytest.raises(ValueError, match="calibration: got .*norms its keys"):
        merge_kv_heads_(qwen3, 2, calibration=IDS)
    merge_kv_heads_(qwen3, 2)
    assert logits(qwen3).shape == (6, 40, 256)


def quantized() -> LlamaForCausalLM:
    model = model_of()
    quantize_(model, RTNConfig(8, 16), progress=False)
    return model


@pytest.mark.parametrize(
    ("make", "heads", "options", "why"),
    [
        (model_of, 3, {}, "num_key_value_heads: got 3; takes a divisor"),
        (model_of, 4, {}, "num_key_value_heads: got 4"),
        (model_of, 8, {}, "num_key_value_heads: got 8"),
        (model_of, 0, {}, "num_key_value_heads: got 0"),
        (
            lambda: model_of(num_key_value_heads=1),
            1,
            {},
            "num_key_value_heads: got 1; takes a divisor of the model's 1",
        ),
        (quantized, 2, {}, "model: got .*quantized"),
        (lambda: torch.nn.Linear(2, 2), 2, {}, "model: got 'Linear'"),
        (lambda: AutoModelForCausalLM.from_config(gpt2()), 2, {}, "model: got 'gpt2'"),
        (model_of, 2, {"merge": "key"}, "merge: got 'key'"),
        (model_of, 2, {"calibration": IDS[0]}, "calibration: got"),
        (model_of, 2, {"calibration": IDS + 250}, "calibration: got 'ids from"),
        (model_of, 2, {"calibration": IDS.float()}, "calibration: got 'torch.float32'"),
        (model_of, 2, {"fit_steps": 3}, "fit_steps: got 3"),
        (model_of, 2, {"fit_steps": 3, "calibration": IDS, "merge": "keys"}, "fit_steps: got 3"),
        (model_of, 2, {"slow_turn": -1.0, "calibration": IDS}, "slow_turn: got -1.0"),
    ],
)
def test_what_is_refused_leaves_the_model_untouched(make, heads: int, options: dict, why: str) -> None:
    model = make()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=why):
        merge_kv_heads_(model, heads, **options)
    assert str(model) == str(before)
    for (name, now), (_, then) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(now, then), name
    if hasattr(model, "config"):
        assert model.config.to_dict() == before.config.to_dict()


def gpt2():
    from transformers import GPT2Config

    return GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16)


def test_an_interrupt_leaves_the_model_untouched(monkeypatch) -> None:
    model = model_of()
    before, calls = logits(model), []
    original = walk._closed_form

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(walk, "_closed_form", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merging.merge_kv_heads_(model, 1, calibration=IDS)
    assert torch.equal(logits(model), before) and model.config.num_key_value_heads == 4
