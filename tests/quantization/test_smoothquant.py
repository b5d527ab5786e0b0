"""SmoothQuant: the migration changes nothing, and INT8 times INT8 is what is really computed."""

import copy

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from labkit.corpora import load_text, token_batches
from labkit.kernels import BackendUnavailable
from labkit.models import LoadedModel, tiny_model
from labkit.quality import kl_divergence, perplexity
from labkit.quantization import FP8Config, Int8Linear, SmoothQuantConfig, quantize_, smooth_, weight_bytes
from labkit.quantization import smoothquant as room

_IDS = torch.randint(0, 256, (4, 48), generator=torch.Generator().manual_seed(1))


def _with_outliers() -> torch.nn.Module:
    """A few channels behind each norm are 60 times as large, and their weights as much smaller: the function stays."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in (
                (layer.input_layernorm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                (layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)),
            ):
                norm.weight[::20] *= 60
                for reader in readers:
                    reader.weight[:, ::20] /= 60
    return model


def test_equation_4() -> None:
    inputs, weights = torch.tensor([4.0, 100.0, 0.0, 3.0]), torch.tensor([1.0, 4.0, 2.0, 0.0])
    scale = room.smoothing_scale(inputs, weights, 0.5)
    assert scale.tolist() == [2.0, 5.0, 1.0, 1.0]
    torch.testing.assert_close(room.smoothing_scale(inputs, weights, 1.0), torch.tensor([4.0, 100.0, 1.0, 1.0]))
    torch.testing.assert_close(room.smoothing_scale(inputs, weights, 0.0), torch.tensor([1.0, 0.25, 1.0, 1.0]))


@torch.no_grad()
def test_migration_alone_changes_no_logits_and_takes_the_outliers_away() -> None:
    model = _with_outliers()
    smooth = copy.deepcopy(model)
    smooth_(smooth, SmoothQuantConfig(), _IDS)
    torch.testing.assert_close(smooth(input_ids=_IDS).logits, model(input_ids=_IDS).logits, rtol=1e-3, atol=2e-3)

    def spread(m: torch.nn.Module) -> float:
        """The largest input of q_proj over the median channel's largest."""
        seen: list[torch.Tensor] = []
        handle = m.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        m(input_ids=_IDS)
        handle.remove()
        largest = seen[0].abs().amax((0, 1))
        return float(largest.max() / largest.median())

    assert spread(model) > 30 and spread(smooth) < 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 16, 33])
def test_int8_linear_is_the_integer_product_with_both_scales(dtype: torch.dtype, rows: int) -> None:
    """Against integers multiplied in float64, which holds these sums exactly."""
    weight, bias = torch.randn(24, 40), torch.randn(24)
    module = room.quantize_rows(weight, bias)
    x = (torch.randn(rows, 40) * torch.logspace(-3, 3, rows)[:, None]).to(dtype)
    scales = x.double().abs().amax(1, keepdim=True) / 127
    codes = (x.float() / scales.float()).round().double()
    assert rows == 0 or codes.abs().amax(1).eq(127).all()
    expected = codes @ module.qweight.double().T * scales * module.scales.double() + bias.double()
    got = module(x)
    assert got.dtype == dtype and got.shape == (rows, 24)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance * 1e-2)


def test_weights_are_rounded_to_nearest_with_one_scale_a_row() -> None:
    weight = torch.randn(5, 32) * torch.logspace(-4, 2, 5)[:, None]
    weight[2] = 0
    module = room.quantize_rows(weight)
    assert module.qweight.dtype == torch.int8 and module.scales.shape == (5,)
    assert module.qweight.abs().amax(1).tolist() == [127, 127, 0, 127, 127]
    assert bool(((module.dequantize() - weight).abs() <= 0.5001 * module.scales[:, None]).all())


def test_shapes_zeros_and_what_is_refused() -> None:
    module = room.quantize_rows(torch.randn(6, 8))
    assert module(torch.zeros(2, 3, 8)).shape == (2, 3, 6)
    assert torch.equal(module(torch.zeros(2, 8)), torch.zeros(2, 6))
    row = torch.randn(8)
    torch.testing.assert_close(module(row), module(row[None])[0])
    assert bool(module(torch.full((1, 8), torch.nan)).isnan().all())
    with pytest.raises(ValueError, match=r"x: got 'shape \(2, 9\)"):
        module(torch.zeros(2, 9))
    with pytest.raises(ValueError, match="qweight: got 'torch.float32'"):
        Int8Linear(torch.zeros(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match="scales: got"):
        Int8Linear(torch.zeros(2, 2, dtype=torch.int8), torch.ones(3))


def test_bytes_are_those_of_int8_and_follow_no_dtype() -> None:
    model = tiny_model()
    kept = weight_bytes(model) - 4 * sum(p.numel() for n, p in model.named_parameters() if "_proj" in n)
    elements = sum(p.numel() for n, p in model.named_parameters() if "_proj" in n)
    rows = sum(p.shape[0] for n, p in model.named_parameters() if "_proj" in n)
    report = quantize_(model, SmoothQuantConfig(), _IDS, progress=False)
    assert weight_bytes(model) == kept + elements + 4 * rows
    assert sum(m.nbytes for m in report.matrices) == elements + 4 * rows
    assert {m.bits for m in report.matrices} == {8} and report.notes == ()
    before = model(input_ids=_IDS).logits
    module = model.model.layers[0].mlp.up_proj
    codes, scales = module.qweight.clone(), module.scales.clone()
    model.to(torch.bfloat16)
    assert torch.equal(module.qweight, codes) and torch.equal(module.scales, scales)
    assert module.scales.dtype == torch.float32
    low = model(input_ids=_IDS).logits
    assert low.dtype == torch.bfloat16
    assert kl_divergence(before, low.float()) < 0.1
    assert model.to("meta").model.layers[0].mlp.up_proj.qweight.device.type == "meta"


def test_a_state_dict_brings_back_the_same_module() -> None:
    first, second = room.quantize_rows(torch.randn(6, 8), torch.randn(6)), room.quantize_rows(torch.zeros(6, 8))
    assert set(first.state_dict()) == {"qweight", "scales", "bias"}
    second.bias = torch.nn.Parameter(torch.zeros(6), requires_grad=False)
    second.load_state_dict(first.state_dict(), assign=True)
    x = torch.randn(3, 8)
    assert torch.equal(first(x), second(x))


def test_a_move_that_fails_leaves_an_int8_matrix_whole() -> None:
    module = room.quantize_rows(torch.randn(6, 8), torch.randn(6))
    x = torch.randn(3, 8)
    before = module(x)
    with pytest.raises(ZeroDivisionError):
        module._apply(lambda tensor: 1 / 0)
    assert set(module._buffers) == {"_place", "qweight", "scales"} and torch.equal(module(x), before)
    # Here `_place` moves, and then the codes cannot: there is nothing to copy.
    empty = room.quantize_rows(torch.randn(6, 8)).to("meta")
    with pytest.raises(NotImplementedError, match="meta"):
        empty.to_empty(device="cpu")
    assert {name: tensor.device.type for name, tensor in empty._buffers.items()} == dict.fromkeys(
        module._buffers, "meta"
    )


def test_migration_makes_up_for_outliers() -> None:
    before = _with_outliers()(input_ids=_IDS).logits
    losses = {}
    for alpha in (0.5, None):
        model = _with_outliers()
        quantize_(model, SmoothQuantConfig(alpha), _IDS, progress=False)
        losses[alpha] = kl_divergence(before, model(input_ids=_IDS).logits)
    assert losses[0.5] < 0.2 * losses[None]


@torch.no_grad()
def test_biases_of_what_writes_a_scaled_channel_are_scaled_with_it() -> None:
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
        if name.endswith("bias"):
            parameter.normal_()
    before = model(input_ids=_IDS).logits
    bias = model.model.layers[0].self_attn.v_proj.bias.clone()
    quantize_(model, SmoothQuantConfig(), _IDS, progress=False)
    assert not torch.allclose(model.model.layers[0].self_attn.v_proj.bias, bias, rtol=0.1)
    assert float((model(input_ids=_IDS).logits - before).abs().max()) < 0.05 * float(before.abs().max())


def test_a_family_that_is_not_known_is_quantized_without_migration_and_says_so() -> None:
    config = OPTConfig(
        vocab_size=256, hidden_size=64, ffn_dim=128, num_hidden_layers=1, num_attention_heads=4, word_embed_proj_dim=64
    )
    torch.manual_seed(0)
    model = OPTForCausalLM(config).eval().requires_grad_(False)
    before = model(input_ids=_IDS).logits
    report = quantize_(model, SmoothQuantConfig(), _IDS, progress=False)
    assert len(report.notes) == 1 and "not scaled" in report.notes[0]
    assert isinstance(model.model.decoder.layers[0].fc1, Int8Linear)
    assert kl_divergence(before, model(input_ids=_IDS).logits) < 1e-4


def test_bits_are_fixed() -> None:
    assert SmoothQuantConfig().bits == 8
    model = tiny_model()
    with pytest.raises(ValueError, match="bits_per_module: got .*; takes nothing with a SmoothQuantConfig"):
        quantize_(model, SmoothQuantConfig(), _IDS, bits_per_module={"model.layers.0.mlp.up_proj": 4}, progress=False)
    assert not any(isinstance(m, Int8Linear) for m in model.modules())
    for alpha in (-0.1, 1.5, True, "half"):
        with pytest.raises(ValueError, match="alpha: got"):
            SmoothQuantConfig(alpha)
    with pytest.raises(ValueError, match="config: got 'FP8Config'"):
        smooth_(model, FP8Config(), _IDS)


def test_what_no_int8_matmul_takes_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_MOST_FEATURES", 100)
    model = tiny_model()
    with pytest.raises(ValueError, match=r"model: got 'model.layers.0.mlp.down_proj of 128 input features'"):
        quantize_(model, SmoothQuantConfig(), _IDS, progress=False)
    assert not any(isinstance(m, Int8Linear) for m in model.modules())
    # 127 * 127 * 133152 > 2^31: the limit is where the sum of equal extremes would wrap.
    monkeypatch.undo()
    features = room._MOST_FEATURES
    ones = torch.full((1, features), 127, dtype=torch.int8)
    assert room.int8_matmul(ones, ones).item() == 127 * 127 * features
    assert 127 * 127 * (features + 1) > 2**31 - 1


def test_odd_sides_are_refused_on_a_gpu_alone() -> None:
    """A meta tensor stands in for one on a GPU: the reason is found before any product."""
    meta = torch.empty(24, 20, dtype=torch.int8, device="meta")
    assert "multiples of 8, and this one has 24 x 20" in room._why_not(meta)
    assert room._why_not(meta.new_empty(24, 16)) == "" and room._why_not(torch.empty(24, 20)) == ""
    with pytest.raises(BackendUnavailable, match="24 x 20"):
        room.int8_matmul(torch.empty(3, 20, dtype=torch.int8, device="meta"), meta)


def test_fewer_rows_than_a_gpu_takes_are_padded_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def int_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x.new_empty(x.shape[0], weight.shape[1], dtype=torch.int32)

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    weight = torch.empty(24, 16, dtype=torch.int8, device="meta")
    for rows in (1, 16, 17, 40):
        y = room.int8_matmul(torch.empty(rows, 16, dtype=torch.int8, device="meta"), weight)
        assert y.shape == (rows, 24)
    assert seen == [(17, 16), (17, 16), (17, 16), (40, 16)]


@pytest.mark.slow
def test_the_default_model_loses_little(default_model: LoadedModel) -> None:
    tokenizer = default_model.tokenizer
    ids = torch.tensor(tokenizer(load_text("pydoc", "eval"), add_special_tokens=False).input_ids)[: 2 * 512]
    calibration = token_batches(tokenizer, load_text("pydoc", "calibration"), 4, 256, 0)
    model = copy.deepcopy(default_model.model)
    quantize_(model, SmoothQuantConfig(), calibration, progress=False)
    assert perplexity(model, ids, 512) < 1.015 * perplexity(default_model, ids, 512)
