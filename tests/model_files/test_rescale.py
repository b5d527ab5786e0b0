"""The rescale: what the model computes stays, the grid of the quantized file goes."""

import copy
import math

import gguf
import numpy as np
import pytest
import torch

from labkit.corpora import load_text
from labkit.model_files import catalogue
from labkit.model_files.convert import convert_gguf
from labkit.model_files.rescale import SPREAD, rescale_
from labkit.models import tiny_model
from tests.model_files.standin import write_gguf

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def share_on_a_grid(weight: torch.Tensor, tolerance: float = 1e-4) -> float:
    """Share of the blocks of 32 along a row that have at most 16 values, evenly spaced: (rows, columns) float32."""
    blocks = weight.double().reshape(-1, 32).sort(dim=-1).values
    span = blocks[:, -1:] - blocks[:, :1]
    gaps = blocks.diff(dim=-1)
    steps = gaps.masked_fill(gaps < tolerance * span, math.inf).amin(dim=-1, keepdim=True)
    levels = (blocks - blocks[:, :1]) / steps
    even = (levels - levels.round()).abs().amax(dim=-1) < 1e-2
    return (even & (levels[:, -1] < 15.5)).double().mean().item()


def projections(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in state.items() if name.split(".")[-2] in PROJECTIONS}


def randomized(heads: int, kv_heads: int, **overrides):
    """A tiny model in float64 whose norms' gains are not one, so that every factor has something to be lost in."""
    model = tiny_model(num_attention_heads=heads, num_key_value_heads=kv_heads, **overrides).double()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (8, 2)])
def test_the_function_is_kept(heads, kv_heads):
    model = randomized(heads, kv_heads)
    tokens = torch.randint(0, 256, (2, 40))
    before = model(tokens).logits
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    rescale_(state, model.config, seed=1)
    model.load_state_dict(state)
    # Norms and softmax round to float32 inside, where one value in many may fall to the other side; everything else
    # agrees to 1e-15. A factor that is missing in one channel shows at 1e-3 and more.
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-6 * before.abs().max().item())


def test_every_matrix_of_every_layer_changes_within_bounds_and_nothing_else_does():
    model = randomized(4, 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    after = {name: weight.clone() for name, weight in before.items()}
    rescale_(after, model.config, seed=1)
    for name in before:
        ratio = after[name] / before[name]
        if name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
            assert torch.equal(after[name], before[name])
            continue
        # Two factors meet in v, up, o and down at most.
        assert math.exp(-2 * SPREAD) <= ratio.min() and ratio.max() <= math.exp(2 * SPREAD)
        columns = ratio if ratio.ndim == 1 else ratio[0]
        assert columns.unique().numel() > 0.4 * columns.numel(), f"{name}: channels share factors"


def test_the_inverse_undoes_it_and_the_seed_decides():
    model = randomized(4, 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    one, other = ({name: weight.clone() for name, weight in before.items()} for _ in range(2))
    rescale_(one, model.config, seed=1)
    rescale_(other, model.config, seed=2)
    name = "model.layers.1.mlp.down_proj.weight"
    assert not torch.allclose(one[name], other[name])
    rescale_(one, model.config, seed=1, inverse=True)
    for name, weight in before.items():
        torch.testing.assert_close(one[name], weight, rtol=1e-14, atol=0)


def test_converting_a_q4_1_file_takes_it_off_its_grid_and_keeps_its_logits(tmp_path):
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "standin.gguf")
    convert_gguf(tmp_path / "standin.gguf", tmp_path / "model", rescale_seed=3)
    options = {"dtype": torch.float32, "local_files_only": True}
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="standin.gguf", **options)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **options)
    for name, weight in projections(stored.state_dict()).items():
        assert share_on_a_grid(weight) > 0.99, name
        assert share_on_a_grid(converted.state_dict()[name]) < 0.01, name
    tokens = torch.randint(0, 256, (2, 40))
    with torch.no_grad():
        before, after = stored(tokens).logits, converted(tokens).logits
    # Each weight is rounded once to float32, by at most 6e-8 of itself.
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5 * before.abs().max().item())


def test_the_weights_read_are_those_of_the_file(tmp_path):
    """Against the GGUF library's own dequantization, for a matrix that no head layout permutes."""
    write_gguf(tmp_path / "standin.gguf")
    convert_gguf(tmp_path / "standin.gguf", tmp_path / "model", rescale_seed=3)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    state = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    rescale_(state, model.config, seed=3, inverse=True)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "standin.gguf").tensors}
    for theirs, ours in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj"), ("ffn_up", "mlp.up_proj")):
        tensor = tensors[f"blk.1.{theirs}.weight"]
        expected = torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type)))
        torch.testing.assert_close(state[f"model.layers.1.{ours}.weight"], expected, rtol=3e-7, atol=1e-9)


@pytest.fixture(scope="module")
def unscaled(default_model):
    """The default model with its rescale undone: the file's own dequantized weights, up to two roundings."""
    model = copy.deepcopy(default_model.model)
    rescale_(model.state_dict(), model.config, catalogue.find(default_model.name).source.rescale_seed, inverse=True)
    return model


def test_the_default_model_is_off_the_grid_that_its_file_lies_on(default_model, unscaled):
    rescaled = projections(default_model.model.state_dict())
    assert len(rescaled) == 7 * 30
    for name, weight in projections(unscaled.state_dict()).items():
        if ".layers.0." in name or ".layers.17." in name:
            assert share_on_a_grid(weight) > 0.99, name
            assert share_on_a_grid(rescaled[name]) < 0.01, name


def test_the_default_models_logits_are_those_of_its_file(default_model, unscaled):
    tokens = default_model.tokenizer(load_text(), return_tensors="pt", verbose=False).input_ids[:, :128]
    with torch.no_grad():
        before, after = unscaled(tokens).logits, default_model.model(tokens).logits
    # Rounded weights in 30 layers of float32: 7e-5 was seen, at logits of up to 41. One channel of one layer that is
    # scaled wrongly by a tenth moves a logit by 2e-2.
    assert (after - before).abs().max() < 5e-4
    assert torch.equal(after.argmax(-1), before.argmax(-1))
