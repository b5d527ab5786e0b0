"""Scales folded into the operation before: the layer computes what it did."""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from labkit.models import LoadedModel, tiny_model
from labkit.quantization import AWQConfig, RTNConfig, SmoothQuantConfig, awq_scale_, quantize_, smooth_
from labkit.quantization.folding import Link, fold, links

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig(**_SIZES)),
    "llama with biases": (LlamaForCausalLM, LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**_SIZES, sliding_window=8)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**_SIZES)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**_SIZES, head_dim=32)),
}


def _model(family: str) -> torch.nn.Module:
    """With biases and gains that are not what they are initialized to."""
    kind, config = _FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _scales(layer: torch.nn.Module) -> dict[Link, torch.Tensor]:
    """From 0.3 to 3, for every place of the layer."""
    found = {}
    for link in links(layer):
        writer = layer.get_submodule(link.writer)
        found[link] = torch.empty(writer.weight.shape[0]).uniform_(-1.2, 1.2).exp()
    return found


@pytest.mark.parametrize("family", _FAMILIES)
@torch.no_grad()
def test_folding_leaves_the_logits_as_they_were(family: str) -> None:
    model = _model(family)
    folded = copy.deepcopy(model)
    ids = torch.arange(24)[None]
    layer = folded.model.layers[0]
    scales = _scales(layer)
    assert [link.writer for link in scales] == [
        "input_layernorm",
        "self_attn.v_proj",
        "post_attention_layernorm",
        "mlp.up_proj",
    ]
    for parameter, value in fold(layer, scales).writes(()):
        parameter.copy_(value)
    torch.testing.assert_close(folded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    for name, before in model.model.layers[0].named_parameters():
        touched = ("norm.weight" in name or "proj.weight" in name) and "_norm.weight" not in name
        changed = (layer.get_parameter(name) - before).abs().max() > 0.1
        assert changed or not touched, name


@torch.no_grad()
def test_what_reads_and_writes_is_scaled_on_both_sides_and_undone() -> None:
    layer = _model("llama with biases").model.layers[0]
    folded = fold(layer, _scales(layer))
    for name in ("self_attn.v_proj", "mlp.up_proj"):
        linear = layer.get_submodule(name)
        columns, rows = folded.columns[name], folded.rows[name]
        torch.testing.assert_close(folded.weight(name, linear), linear.weight * columns / rows[:, None])
        torch.testing.assert_close(folded.bias(name, linear), linear.bias / rows)
    for name in folded.columns:
        linear = layer.get_submodule(name)
        torch.testing.assert_close(folded.undo(name, folded.weight(name, linear)), linear.weight)
    assert "mlp.gate_proj" not in folded.rows


def test_query_heads_that_share_a_kv_head_share_its_scales() -> None:
    link = Link("v", ("o",), repeats=3, head_dim=2)
    columns = link.by_column(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert columns.tolist() == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    values = torch.tensor([1.0, 10.0, 2.0, 20.0, 6.0, 60.0, 0.0, 0.0, 0.0, 0.0, 3.0, 6.0])
    assert link.by_channel(values, torch.mean).tolist() == [3, 30, 1, 2]
    assert link.by_channel(values, torch.amax).tolist() == [6, 60, 3, 6]


@torch.no_grad()
def test_a_gain_rounded_to_bfloat16_is_made_up_for_by_its_readers() -> None:
    """What the columns are multiplied with is what the stored gain really divides by, and a gain of 0 stays 0."""
    layer = _model("llama").to(torch.bfloat16).model.layers[0]
    gain = layer.input_layernorm.weight
    gain[0] = 0
    link = links(layer)[0]
    folded = fold(layer, {link: torch.linspace(0.31, 2.9, len(gain))})
    new = folded.gains["input_layernorm"]
    assert new.dtype == torch.bfloat16 and new[0] == 0
    columns = folded.columns["self_attn.q_proj"]
    torch.testing.assert_close(new.float() * columns, gain.float(), rtol=1e-6, atol=0)
    assert bool((columns > 0).all())


def test_there_is_nothing_to_fold_into_where_the_layer_is_not_known() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, word_embed_proj_dim=32
    )
    assert links(OPTForCausalLM(config).model.decoder.layers[0]) == ()
    assert links(None) == ()
    assert fold(None, {}).writes(()) == []


_IDS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(1))
_WHOLE = [(awq_scale_, AWQConfig(4, 32)), (smooth_, SmoothQuantConfig())]


@pytest.mark.parametrize(("fold_", "config"), _WHOLE)
@torch.no_grad()
def test_what_a_whole_model_is_refused_for_before_anything_is_touched(fold_: Callable, config: object) -> None:
    quantized, broken, plain = tiny_model(), tiny_model(), tiny_model()
    quantize_(quantized, RTNConfig(4, 32), modules_to_not_convert=("lm_head", "layers.0"), progress=False)
    broken.model.layers[1].mlp.down_proj.weight[3, 3] = torch.nan
    cases = [
        (torch.nn.Linear(4, 4), _IDS, "^model: got 'Linear'; takes a transformers causal LM"),
        (quantized, _IDS, "^model: got 'a model in which 7 modules are quantized"),
        (broken, _IDS, "^model: got 'NaN or an infinity in model.layers.1.mlp.down_proj.weight'"),
        (plain, None, "^calibration: got None"),
    ]
    for model, ids, says in cases:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=says):
            fold_(model, config, ids)
        assert all(tensor.equal(before[name]) or "down" in name for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="^group_size: got 48; takes a divisor of the 64 input features of model.lay"):
        awq_scale_(plain, AWQConfig(4, 48), _IDS)


@pytest.mark.parametrize(("fold_", "config"), _WHOLE)
@torch.no_grad()
def test_a_whole_model_is_calibrated_without_dropout_and_left_in_its_mode(fold_: Callable, config: object) -> None:
    models = [tiny_model(attention_dropout=0.5) for _ in range(2)]
    for model, training in zip(models, (True, False), strict=True):
        fold_(LoadedModel(model.train(training), None, "tiny"), config, _IDS)
        assert {module.training for module in model.modules()} == {training}
    states = [model.state_dict() for model in models]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    with pytest.raises(ZeroDivisionError):
        models[0].model.layers[1].mlp.forward = lambda x: 1 / 0
        fold_(models[0], config, _IDS)
    assert models[0].training


@torch.no_grad()
def test_the_last_layer_of_a_whole_model_runs_for_its_statistics_alone() -> None:
    model, passes = tiny_model(), []
    model.model.layers[1].register_forward_hook(lambda *_: passes.append(1))
    smooth_(model, SmoothQuantConfig(), _IDS)
    assert len(passes) == len(_IDS)
