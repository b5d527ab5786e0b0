"""AWQ: scales found by their error, folded exactly, and a clipping that helps."""

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from labkit.corpora import load_text, token_batches
from labkit.models import LoadedModel, tiny_model
from labkit.quality import kl_divergence, perplexity
from labkit.quantization import AWQConfig, PackedWeight, QuantLinear, RTNConfig, awq_scale_, quantize_, rtn
from labkit.quantization import awq as room
from labkit.quantization.calibration import InputStatistics, LayerInputs, LayerTask
from labkit.quantization.folding import Link, fold
from labkit.quantization.primitives import minmax_grid

_IDS = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(1))
_GAINS = torch.randn(64, generator=torch.Generator().manual_seed(2)).mul(1.2).exp()


def _uneven_model() -> torch.nn.Module:
    """Norms whose channels differ as much as those of a trained model, which random ones do not."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.copy_(_GAINS)
            layer.post_attention_layernorm.weight.copy_(_GAINS.flip(0))
    return model


def _packed(model: torch.nn.Module) -> dict[str, PackedWeight]:
    return {name: m.portable() for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def _inputs(rows: int, columns: int) -> tuple[torch.Tensor, InputStatistics]:
    """Correlated inputs `(rows, columns)` with a mean and a few large channels, and their statistics."""
    x = torch.randn(rows, columns) + 0.5 * torch.randn(rows, 1) + 0.3
    x[:, ::9] *= 12
    statistics = InputStatistics.empty(columns, x.device)
    statistics.add(x)
    return x, statistics


@pytest.mark.parametrize("zero_point", [True, False])
def test_at_ratio_0_without_clipping_it_is_round_to_nearest(zero_point: bool) -> None:
    plain, scaled = _uneven_model(), _uneven_model()
    quantize_(plain, RTNConfig(4, 32, sym=not zero_point), progress=False)
    quantize_(scaled, AWQConfig(4, 32, zero_point=zero_point, n_grid=1, clip=False), _IDS, progress=False)
    expected, got = _packed(plain), _packed(scaled)
    assert len(expected) == 14 and expected.keys() == got.keys()
    for name, weight in expected.items():
        assert weight.tensors.keys() == got[name].tensors.keys()
        assert ("zeros" in weight.tensors) == zero_point
        for part, tensor in weight.tensors.items():
            assert torch.equal(tensor, got[name].tensors[part]), (name, part)


@torch.no_grad()
def test_folding_alone_changes_weights_and_no_logits() -> None:
    model = _uneven_model()
    scaled = copy.deepcopy(model)
    awq_scale_(scaled, AWQConfig(3, 32), _IDS)
    for name, parameter in model.model.layers[1].named_parameters():
        assert not torch.equal(parameter, scaled.model.layers[1].get_parameter(name)), name
    torch.testing.assert_close(scaled(input_ids=_IDS).logits, model(input_ids=_IDS).logits, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("duo_scaling", [True, False])
def test_the_scale_is_the_best_of_the_candidates_on_the_inputs_themselves(duo_scaling: bool) -> None:
    """The error in closed form is that of running the inputs, summed over matrices, each over its output's size."""
    x, statistics = _inputs(200, 64)
    weights = [torch.randn(24, 64), 5 * torch.randn(8, 64)]
    config = AWQConfig(3, 32, n_grid=8, duo_scaling=duo_scaling)
    scale, error = room.search_scale(weights, [config] * 2, statistics, Link("norm", ("a", "b"), head_dim=64))
    size = torch.cat([w.abs().unflatten(1, (2, 32)) for w in weights])
    size = (size / size.amax(-1, keepdim=True)).flatten(1).mean(0)
    errors, tried = [], []
    for ratio in (i / 8 for i in range(8)):
        s = x.abs().mean(0) ** ratio / (size ** (1 - ratio) if duo_scaling and ratio else 1)
        s = s / (s.max() * s.min()).sqrt()
        total = 0.0
        for weight in weights:
            module = tiny_model().model.layers[0].self_attn.q_proj
            module.weight = torch.nn.Parameter(weight * s, requires_grad=False)
            task = LayerTask("", None, {"m": module}, {}, RTNConfig(3, 32))
            rounded = rtn.quantize_layer(task).replacements["m"].approximation
            y = x @ weight.T
            total += float((x / s @ rounded.T - y).square().sum() / y.square().sum())
        errors.append(total)
        tried.append(s)
    best = min(range(8), key=errors.__getitem__)
    assert best > 0 and errors[best] < 0.8 * errors[0]
    assert error == pytest.approx(errors[best], rel=1e-3)
    torch.testing.assert_close(scale, tried[best], rtol=1e-4, atol=1e-5)


def test_a_channel_without_input_does_not_stretch_the_others() -> None:
    inputs = torch.tensor([1.0, 0.0, 4.0, 2.0])
    for scale in room.candidate_scales(inputs, torch.ones(4), 10, False):
        assert 0.4 < float(scale.min()) and float(scale.max()) < 2.1


def test_clipping_lowers_the_error_and_the_second_search_lowers_it_further(monkeypatch: pytest.MonkeyPatch) -> None:
    x, statistics = _inputs(300, 128)
    weight = torch.randn(32, 128) ** 3
    config = AWQConfig(3, 32)

    def error(shrink: float | torch.Tensor) -> float:
        difference = room._difference(weight, config, shrink)
        return float((x @ difference.T).square().mean())

    joint = room.search_clipping(weight, statistics.gram, config)
    monkeypatch.setattr(room, "_ROUNDS", 0)
    apart = room.search_clipping(weight, statistics.gram, config)
    assert joint.shape == (32, 4) and float(joint.max()) <= 1 and float(joint.min()) < 0.8
    assert error(apart) < 0.9 * error(1.0)
    assert error(joint) < 0.95 * error(apart)


def test_a_group_is_set_to_the_best_beside_what_the_others_have() -> None:
    """The whole rows' error, with the inputs run, for each step of one group while the other stays."""
    x, statistics = _inputs(300, 64)
    weight, config, steps = torch.randn(40, 64) ** 3, AWQConfig(3, 32), (0.0, -0.1, -0.2, -0.3, -0.4)
    left, right = weight.split(32, dim=1)
    fixed = room._difference(right, config)
    gram, shrink = statistics.gram, torch.ones(40)
    change = room._choose(left, gram[:32, :32], fixed @ gram[32:, :32], config, shrink, steps)
    tried = [room._difference(left, config, 1 + step) for step in steps]
    errors = torch.stack([(x @ torch.cat([d, fixed], dim=1).T).square().mean(0) for d in tried])
    best = errors.argmin(0)
    assert len(best.unique()) > 2
    torch.testing.assert_close(shrink, 1 + torch.tensor(steps)[best])
    torch.testing.assert_close(change, torch.stack(tried)[best, torch.arange(40)])


def test_each_group_alone_gets_the_best_shrink_for_its_own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_ROUNDS", 0)
    x, statistics = _inputs(300, 64)
    weight, config = torch.randn(6, 64) ** 3, AWQConfig(3, 32)
    shrink = room.search_clipping(weight, statistics.gram, config)
    for group, part in enumerate((slice(0, 32), slice(32, 64))):
        errors = torch.stack(
            [
                (x[:, part] @ room._difference(weight[:, part], config, s).T).square().mean(0)
                for s in (1 - 0.05 * i for i in range(11))
            ]
        )
        torch.testing.assert_close(shrink[:, group], 1 - 0.05 * errors.argmin(0), rtol=0, atol=1e-5)


@torch.no_grad()
def test_clipping_is_searched_on_the_inputs_that_the_folds_leave() -> None:
    """The groups' ranges are those that the search finds on statistics taken from the folded layer itself."""
    model, config = _uneven_model(), AWQConfig(4, 32)
    layer = model.model.layers[0]
    inputs = LayerInputs(model, _IDS, layer)
    linears = {f"layer.{name}": m for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    task = LayerTask("layer", layer, linears, inputs.statistics(layer, linears), config)
    packed = {name: new.module.portable() for name, new in room.quantize_layer(task).replacements.items()}
    for parameter, value in fold(layer, room.find_scales(task)).writes(()):
        parameter.copy_(value)
    statistics = inputs.statistics(layer, linears)
    for name, linear in linears.items():
        shrink = room.search_clipping(linear.weight, statistics[name].gram, config)
        scales = minmax_grid(linear.weight.unflatten(1, (-1, 32)), 4, False, shrink).scales
        near = (packed[name].scales.float() / scales - 1).abs() < 0.01
        assert float(near.float().mean()) > 0.9, name


@torch.no_grad()
def test_what_it_reports_as_a_weight_is_what_the_layer_computes() -> None:
    """With scales on both sides of v and up: the folds undone, the former layer with those weights gives its output."""
    model = _uneven_model()
    layer = model.model.layers[0]
    inputs = LayerInputs(model, _IDS, layer)
    linears = {f"layer.{name}": m for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
    task = LayerTask("layer", layer, linears, inputs.statistics(layer, linears), AWQConfig(4, 32))
    result = room.quantize_layer(task)
    assert task.notes == []
    by_weight = copy.deepcopy(layer)
    for name, new in result.replacements.items():
        by_weight.get_submodule(name.removeprefix("layer.")).weight.copy_(new.approximation)
    expected = torch.cat(list(inputs.run(by_weight)))
    before = torch.cat(list(inputs.run(layer)))
    for parameter, value in result.folds:
        parameter.copy_(value)
    for name, new in result.replacements.items():
        parent, _, child = name.removeprefix("layer.").rpartition(".")
        setattr(layer.get_submodule(parent), child, new.module)
    got = torch.cat(list(inputs.run(layer)))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert float((got - before).abs().max()) > 0.05


def _biased_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(_GAINS)
        elif name.endswith("bias"):
            parameter.normal_()
    return model


@pytest.mark.parametrize("build", [_uneven_model, _biased_model])
@pytest.mark.parametrize("kept", [(), ("v_proj",), ("o_proj",), ("up_proj", "gate_proj", "q_proj")])
@torch.no_grad()
def test_matrices_left_in_floats_take_their_part_of_the_scales(
    build: Callable[[], torch.nn.Module], kept: tuple[str, ...]
) -> None:
    model = build()
    before = model(input_ids=_IDS).logits
    plain = copy.deepcopy(model)
    quantize_(model, AWQConfig(8, 32), _IDS, modules_to_not_convert=("lm_head", *kept), progress=False)
    quantize_(plain, RTNConfig(4, 32), modules_to_not_convert=("lm_head", *kept), progress=False)
    for name, module in model.model.layers[0].named_modules():
        if name.endswith("_proj"):
            assert isinstance(module, QuantLinear) != name.endswith(kept or ("?",)), name
    # At 8 bits the loss is small: far below that of 4 bits, where a scale on one side alone is many times as bad.
    loss = kl_divergence(before, model(input_ids=_IDS).logits)
    assert loss < 0.1 * kl_divergence(before, plain(input_ids=_IDS).logits)


def test_it_beats_round_to_nearest() -> None:
    losses = {}
    before = _uneven_model()(input_ids=_IDS).logits
    for name, config in {"rtn": RTNConfig(3, 32), "awq": AWQConfig(3, 32)}.items():
        model = _uneven_model()
        report = quantize_(model, config, _IDS, progress=False)
        losses[name] = (sum(m.error for m in report.matrices), kl_divergence(before, model(input_ids=_IDS).logits))
    assert losses["awq"][0] < 0.6 * losses["rtn"][0]
    assert losses["awq"][1] < 0.8 * losses["rtn"][1]


def test_bits_of_single_matrices() -> None:
    model = _uneven_model()
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    report = quantize_(model, AWQConfig(4, 32), _IDS, bits_per_module=dict.fromkeys(names, 8), progress=False)
    assert {m.name for m in report.matrices if m.bits == 8} == set(names)
    assert {name for name, weight in _packed(model).items() if weight.bits == 8} == set(names)


def test_where_no_scale_can_be_folded_it_says_so_and_clips_alone() -> None:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=256, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=64
    )
    model = OPTForCausalLM(config).eval().requires_grad_(False)
    norm = model.model.decoder.layers[0].self_attn_layer_norm.weight.clone()
    report = quantize_(model, AWQConfig(4, 32), _IDS, progress=False)
    assert len(report.notes) == 2 and "layers.0.fc1" in report.notes[0] and "not scaled" in report.notes[0]
    assert torch.equal(norm, model.model.decoder.layers[0].self_attn_layer_norm.weight)
    assert len(report.matrices) == 12


def test_a_head_is_not_scaled() -> None:
    model = _uneven_model()
    report = quantize_(model, AWQConfig(4, 32), _IDS, modules_to_not_convert=(), progress=False)
    assert len(report.notes) == 1 and report.notes[0].startswith("lm_head: ")
    assert isinstance(model.lm_head, QuantLinear)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bits": 5}, "bits: got 5"),
        ({"group_size": 12}, "group_size: got 12"),
        ({"zero_point": 1}, "zero_point: got 1"),
        ({"n_grid": 0}, "n_grid: got 0"),
        ({"clip": "yes"}, "clip: got 'yes'"),
        ({"duo_scaling": None}, "duo_scaling: got None"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AWQConfig(**fields)


def test_it_needs_calibration() -> None:
    with pytest.raises(ValueError, match="calibration: got None"):
        quantize_(_uneven_model(), AWQConfig(4, 32), progress=False)
    with pytest.raises(ValueError, match="config: got 'RTNConfig'; takes an AWQConfig"):
        awq_scale_(_uneven_model(), RTNConfig(4, 32), _IDS)


@pytest.mark.slow
def test_it_wins_back_most_of_what_rounding_costs_the_default_model(default_model: LoadedModel) -> None:
    tokenizer = default_model.tokenizer
    ids = torch.tensor(tokenizer(load_text("pydoc", "eval"), add_special_tokens=False).input_ids)[: 2 * 512]
    calibration = token_batches(tokenizer, load_text("pydoc", "calibration"), 4, 256, 0)
    # A third of the layers: enough to see, and the search over every layer takes a minute.
    left_alone = ("lm_head", *(f"model.layers.{layer}" for layer in range(10, 30)))
    values = {"base": perplexity(default_model, ids, 512)}
    for name, config in {"rtn": RTNConfig(4, 64), "awq": AWQConfig(4, 64)}.items():
        model = copy.deepcopy(default_model.model)
        given = calibration if name == "awq" else None
        quantize_(model, config, given, modules_to_not_convert=left_alone, progress=False)
        values[name] = perplexity(model, ids, 512)
    closed = (values["rtn"] - values["awq"]) / (values["rtn"] - values["base"])
    assert closed > 0.5, values
