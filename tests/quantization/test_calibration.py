"""Calibration: what flows into each matrix, held against inputs that were recorded, and what is refused."""

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from labkit.models import tiny_model
from labkit.quantization import GPTQConfig, quantize_
from labkit.quantization.calibration import (
    InputStatistics,
    LayerInputs,
    LayerTask,
    check_calibration,
    decoder_layers,
    watch_inputs,
)
from labkit.quantization.rtn import RTNConfig

PREFIX = "model.layers.0"


def layer_linears(model: PreTrainedModel, index: int = 0) -> dict[str, nn.Linear]:
    prefix = f"model.layers.{index}."
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(prefix)}


def recorded(model: PreTrainedModel, ids: torch.Tensor, linears: dict[str, nn.Linear]) -> dict[str, torch.Tensor]:
    """Every matrix's inputs in one pass over all samples, (tokens, in_features), float64."""
    found, handles = {}, []
    for name, linear in linears.items():
        keep = lambda _, args, name=name: found.__setitem__(name, args[0].flatten(0, -2).double())  # noqa: E731
        handles.append(linear.register_forward_pre_hook(keep))
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@torch.no_grad()
def test_statistics_are_those_of_the_recorded_inputs() -> None:
    model, ids = tiny_model(), torch.randint(0, 256, (5, 24))
    linears, before = layer_linears(model), hooks(model)
    found = LayerInputs(model, ids, model.model.layers[0]).statistics(model.model.layers[0], linears)
    assert hooks(model) == before and set(found) == set(linears)
    for name, x in recorded(model, ids, linears).items():
        mine = found[name]
        assert mine.tokens == len(x) == 120 and mine.gram.dtype == torch.float32
        torch.testing.assert_close(mine.gram.double(), x.T @ x / len(x), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mine.mean_abs.double(), x.abs().mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(mine.max_abs.double(), x.abs().amax(0), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_matrices_that_read_one_tensor_share_its_statistics() -> None:
    model, ids = tiny_model(), torch.randint(0, 256, (3, 8))
    linears = layer_linears(model)
    found = LayerInputs(model, ids, model.model.layers[0]).statistics(model.model.layers[0], linears)
    short = {name.rpartition(".")[2]: statistics for name, statistics in found.items()}
    assert short["q_proj"] is short["k_proj"] is short["v_proj"] and short["gate_proj"] is short["up_proj"]
    assert len({id(s) for s in short.values()}) == 4 and all(s.tokens == 24 for s in short.values())
    task = LayerTask(PREFIX, model.model.layers[0], linears, found, RTNConfig())
    groups = [[name.rpartition(".")[2] for name in names] for names in task.by_input()]
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


@torch.no_grad()
def test_inputs_that_are_equal_but_not_the_same_are_not_shared() -> None:
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    x = torch.randn(6, 4)
    with watch_inputs({"a": first, "b": second}) as found:
        first(x), second(x.clone())
        first(x + 1), second(x - 1)
    assert found["a"] is not found["b"] and found["a"].tokens == found["b"].tokens == 12
    assert not torch.allclose(found["a"].gram, found["b"].gram)


def test_statistics_do_not_depend_on_how_tokens_are_cut() -> None:
    x = torch.randn(60, 8) * torch.logspace(-2, 2, 8)
    whole, parts = (InputStatistics.empty(8, torch.device("cpu")) for _ in range(2))
    whole.add(x)
    for piece in x.split([1, 7, 32, 20]):
        parts.add(piece[None])
    parts.add(x[:0])
    assert whole.tokens == parts.tokens == 60
    for field in ("gram", "mean_abs", "max_abs"):
        torch.testing.assert_close(getattr(parts, field), getattr(whole, field), rtol=1e-5, atol=1e-6)
    assert torch.equal(whole.max_abs, x.abs().amax(0))


def test_half_precision_inputs_are_summed_in_float32() -> None:
    x = torch.randn(4096, 4).bfloat16()
    statistics = InputStatistics.empty(4, torch.device("cpu"))
    for piece in x.split(16):
        statistics.add(piece)
    torch.testing.assert_close(statistics.gram.double(), (x.double().T @ x.double()) / 4096, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layer_after_layer_gives_the_models_own_hidden_states() -> None:
    model, ids = tiny_model(num_hidden_layers=3), torch.randint(0, 256, (4, 16))
    states = model.model(ids, output_hidden_states=True).hidden_states
    inputs, before = LayerInputs(model, ids, model.model.layers[0]), hooks(model)
    for layer, state in zip(model.model.layers, states[:-1], strict=True):
        torch.testing.assert_close(torch.cat(inputs.hidden), state, rtol=1e-5, atol=1e-5)
        assert len(list(inputs.run(layer))) == 4
        inputs.advance(layer)
    torch.testing.assert_close(model.model.norm(torch.cat(inputs.hidden)), states[-1], rtol=1e-5, atol=1e-5)
    assert hooks(model) == before


@torch.no_grad()
def test_layers_of_several_kinds_each_get_their_own_mask_and_positions() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
    config = Gemma3TextConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, sliding_window=4, layer_types=kinds
    )
    model, ids = Gemma3ForCausalLM(config).eval(), torch.randint(0, 64, (3, 20))
    inputs = LayerInputs(model, ids, model.model.layers[0])
    for layer in model.model.layers:
        inputs.advance(layer)
    expected = model.model(ids).last_hidden_state
    torch.testing.assert_close(model.model.norm(torch.cat(inputs.hidden)), expected, rtol=1e-5, atol=1e-5)
    assert hooks(model) == 0


def test_hooks_are_gone_after_an_error_in_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), torch.randint(0, 256, (2, 8))
    monkeypatch.setattr(model.model.embed_tokens, "forward", lambda ids: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        LayerInputs(model, ids, model.model.layers[0])
    assert hooks(model) == 0
    linear = nn.Linear(2, 2)
    with pytest.raises(KeyError), watch_inputs({"a": linear}):
        raise KeyError
    assert not linear._forward_pre_hooks


def test_the_bits_of_one_matrix() -> None:
    task = LayerTask("l", None, {}, {}, RTNConfig(4, 16, True), {"a": 8})
    assert task.config_of("a") == RTNConfig(8, 16, True) and task.config_of("b") is task.config


def test_calibration_may_be_a_tensor_or_a_list() -> None:
    model, ids = tiny_model(), torch.randint(0, 256, (3, 8))
    for given in (ids, list(ids), tuple(ids), ids.int(), [row.int() for row in ids]):
        checked = check_calibration(model, given)
        assert checked.dtype == torch.int64 and torch.equal(checked, ids)


@pytest.mark.parametrize(
    "calibration",
    [
        None,
        [],
        torch.zeros(0, 8, dtype=torch.long),
        torch.zeros(2, 0, dtype=torch.long),
        torch.zeros(2, 1, dtype=torch.long),
        torch.zeros(8, dtype=torch.long),
        torch.zeros(1, 33, dtype=torch.long),
        torch.zeros(2, 8),
        torch.zeros(2, 8, dtype=torch.bool),
        torch.full((2, 8), 256),
        torch.full((2, 8), -1),
        [torch.zeros(8, dtype=torch.long), torch.zeros(7, dtype=torch.long)],
        [torch.zeros(1, 8, dtype=torch.long)],
        [[1, 2, 3]],
        "text",
        ["text"],
        42,
    ],
)
def test_refused_calibration(calibration: object) -> None:
    model = tiny_model(max_position_embeddings=32)
    with pytest.raises(ValueError, match="^calibration: got"):
        check_calibration(model, calibration)


def test_a_model_without_a_longest_text_takes_any() -> None:
    """BLOOM has ALiBi, and no max_position_embeddings in its config."""
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)).eval()
    ids = torch.randint(0, 64, (2, 40))
    assert torch.equal(check_calibration(model, ids), ids)
    with pytest.raises(ValueError, match="at least one sample of 2 tokens or more$"):
        check_calibration(model, ids[:, :1])
    report = quantize_(model, GPTQConfig(4, 32), ids, progress=False)
    assert len(report.matrices) == 8 and all(m.error < 0.05 for m in report.matrices)


def test_unequal_lengths_name_the_short_sample() -> None:
    samples = [torch.zeros(n, dtype=torch.long) for n in (8, 5, 8)]
    with pytest.raises(ValueError, match="sample 1 of 5 tokens beside others of 8"):
        check_calibration(tiny_model(), samples)


def test_decoder_layers() -> None:
    name, layers = decoder_layers(tiny_model())
    assert name == "model.layers" and len(layers) == 2
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2))
    assert decoder_layers(gpt2)[0] == "transformer.h"
    gpt2.transformer.h = gpt2.transformer.h[:1]
    with pytest.raises(ValueError, match="^model: got 'GPT2LMHeadModel'"):
        decoder_layers(gpt2)
