"""The chapter's small experiments measure what they say, and leave the model as it was."""

import pytest
import torch

from labkit.models import tiny_model
from labkit.quality import perplexity
from labkit.quantization import AWQConfig, QuantLinear, RTNConfig, output_error, quantize_, quantize_embedding_
from labkit.quantization.awq import search_scale
from labkit.quantization.experiments import (
    act_order_layout,
    keep_columns,
    layer_task,
    one_block,
    parts,
    ratio_curves,
)
from labkit.quantization.folding import links
from labkit.quantization.rtn import round_to_nearest


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def unchanged(model):
    """Every experiment works on copies."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    yield
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_layers_task_holds_the_inputs_that_the_float_model_brings_to_it(model, ids):
    task = layer_task(model, ids, 1, None)
    with torch.no_grad():
        hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[1]
        x = model.model.layers[1].input_layernorm(hidden).reshape(-1, 64)
    gram = task.statistics["model.layers.1.self_attn.q_proj"].gram
    assert torch.allclose(gram, x.T @ x / len(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="^layer: got 9"):
        layer_task(model, ids, 9, None)


def test_one_block_gives_each_methods_error_on_the_same_inputs(model, ids):
    rows = one_block(model, ids, layer=1, bits=3, group_size=32)
    assert [row.name for row in rows][:2] == ["q_proj", "k_proj"] and len(rows) == 7
    task = layer_task(model, ids, 1, None)
    name = "model.layers.1.mlp.down_proj"
    weight, gram = task.linears[name].weight, task.statistics[name].gram
    nearest = round_to_nearest(weight, RTNConfig(3, 32)).dequantize()
    assert rows[-1].rtn == pytest.approx(output_error(weight, nearest, gram), rel=1e-5)
    assert sum(row.gptq for row in rows) < sum(row.rtn for row in rows)
    assert sum(row.awq for row in rows) < sum(row.rtn for row in rows)


def test_the_columns_with_the_largest_inputs_are_the_ones_to_keep(model, ids):
    task = layer_task(model, ids, 0, None)
    name = "model.layers.0.mlp.down_proj"
    weight, found = task.linears[name].weight, task.statistics[name]
    found.gram[7] *= 100
    found.gram[:, 7] *= 100
    found.mean_abs[7] *= 100
    errors = keep_columns(weight, found, RTNConfig(3, 32), share=0.01)
    assert errors["largest inputs"] < 0.1 * errors["none kept"]
    assert errors["at random"] > 0.5 * errors["none kept"]
    everything = keep_columns(weight, found, RTNConfig(3, 32), share=1.0)
    assert everything["at random"] == everything["largest inputs"] == 0.0
    with pytest.raises(ValueError, match="^share"):
        keep_columns(weight, found, RTNConfig(3, 32), share=1.5)


def test_ratio_curves_begin_at_plain_rounding_and_their_valley_is_what_the_search_finds(model, ids):
    config = AWQConfig(bits=3, group_size=32, n_grid=8)
    task = layer_task(model, ids, 1, config)
    ratios, curves = ratio_curves(task, config)
    assert ratios == [i / 8 for i in range(8)]
    assert list(curves) == ["q, k, v", "o", "gate, up", "down"] and {len(c) for c in curves.values()} == {8}
    name = "model.layers.1.mlp.down_proj"
    weight, found = task.linears[name].weight, task.statistics[name]
    nearest = round_to_nearest(weight, RTNConfig(3, 32)).dequantize()
    assert curves["down"][0] == pytest.approx(output_error(weight, nearest, found.gram), rel=1e-4)
    _, least = search_scale([weight], [config], found, links(task.module)[3])
    assert min(curves["down"]) == pytest.approx(least)


def test_act_orders_layout_scatters_the_columns_of_each_group_and_keeps_their_number(ids):
    model = tiny_model()
    quantize_(model, RTNConfig(4, 32), progress=False)
    before = model(input_ids=ids).logits
    scattered = act_order_layout(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    for name, module in scattered.named_modules():
        if isinstance(module, QuantLinear):
            g_idx = module.portable().g_idx
            assert torch.equal(g_idx.bincount(), torch.full((module.in_features // 32,), 32))
            assert not torch.equal(g_idx, g_idx.sort().values)
            assert torch.equal(module.portable().qweight, model.get_submodule(name).portable().qweight)


@pytest.mark.parametrize("tied", [False, True])
def test_each_part_alone_is_what_quantizing_it_by_hand_gives(tied, ids):
    model, text = tiny_model(tie_word_embeddings=tied), ids.flatten()
    found = {part.name: part for part in parts(model, text, 32)}
    table = "embedding and head" if tied else "embedding"
    assert list(found) == [f"{part}, {bits} bits" for bits in (8, 4) for part in ("head", table, "norms")]
    base = perplexity(model, text, 32)
    by_hand = tiny_model(tie_word_embeddings=tied)
    quantize_embedding_(by_hand, RTNConfig(4, 64))
    assert found[f"{table}, 4 bits"].ratio == pytest.approx(perplexity(by_hand, text, 32) / base, rel=1e-6)
    by_hand = tiny_model(tie_word_embeddings=tied)
    quantize_(by_hand, RTNConfig(4, 64), modules_to_not_convert=("layers",))
    assert found["head, 4 bits"].ratio == pytest.approx(perplexity(by_hand, text, 32) / base, rel=1e-6)
    # 256 rows of 64: 2 bytes a weight before; 4 bits, a scale of 2 bytes and a zero point of 1 for each group after.
    packed = 256 * (32 + 3)
    assert found[f"{table}, 4 bits"].saved == 2 * 256 * 64 - packed
    # A tied head alone comes beside the table, which the embedding still reads.
    assert found["head, 4 bits"].saved == (-packed if tied else 2 * 256 * 64 - packed)
    assert found["norms, 4 bits"].ratio != 1.0 and found["norms, 4 bits"].saved == 0
