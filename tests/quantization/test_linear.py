"""QuantLinear and QuantEmbedding: exact under every move, and at home in a model, a checkpoint and the Decoder."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.engine import Decoder
from labkit.kernels.quantized_linear import Int4PackWeight
from labkit.models import tiny_model
from labkit.quantization import (
    GPTQConfig,
    PackedWeight,
    QuantEmbedding,
    QuantLinear,
    RTNConfig,
    quantize_,
    quantize_embedding_,
    weight_bytes,
)
from labkit.quantization.linear import packed_replacement
from labkit.quantization.rtn import round_to_nearest


def packed(bits: int = 4, sym: bool = False, act_order: bool = False, group: int = 32) -> PackedWeight:
    weight = round_to_nearest(torch.randn(32, 128), RTNConfig(bits, group, sym))
    if not act_order:
        return weight
    g_idx = (torch.randperm(128) // group).int()
    return PackedWeight(weight.qweight, weight.scales, weight.zeros, g_idx, bits, group, 128)


def same(a: PackedWeight, b: PackedWeight) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(
        a.tensors[name].dtype == b.tensors[name].dtype and torch.equal(a.tensors[name], b.tensors[name])
        for name in a.tensors
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_no_move_changes_a_code_or_a_scale(bits: int, sym: bool, act_order: bool) -> None:
    weight = packed(bits, sym, act_order)
    original = weight.map(torch.clone)
    module = QuantLinear(weight, torch.randn(32))
    for move in ("bfloat16", "float", "half", "double", "bfloat16", "cpu", "float"):
        getattr(module, move)()
        assert same(module.portable(), original), move
        assert module.weight.scales_and_offsets.dtype == torch.bfloat16 if move == "bfloat16" and bits in (4, 8) else 1
        assert isinstance(module.weight, Int4PackWeight) == (bits in (4, 8) and module.bias.dtype == torch.bfloat16)
    assert module.to(torch.float16, non_blocking=True) is module and module.bias.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_forward_is_the_dequantized_linear(dtype: torch.dtype, bias: bool, act_order: bool) -> None:
    weight, b = packed(act_order=act_order), torch.randn(32).to(dtype) if bias else None
    module, x = QuantLinear(weight, b, dtype=dtype), torch.randn(2, 5, 128).to(dtype)
    exact = F.linear(x.double(), weight.dequantize(torch.float64), None if b is None else b.double())
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.1}
    torch.testing.assert_close(module(x), exact.to(dtype), **tolerance)
    assert (module.in_features, module.out_features) == (128, 32)
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_has_the_dtype_of_the_input(held: torch.dtype, given: torch.dtype) -> None:
    module = QuantLinear(packed(), torch.randn(32).to(held), dtype=held)
    assert module(torch.randn(3, 128).to(given)).dtype == given


def test_the_bound_projection_is_forward() -> None:
    for bits in (3, 4, 8):
        for act_order in (True, False):
            for bias in (None, torch.randn(32)):
                module = QuantLinear(packed(bits, act_order=act_order), bias).to(torch.bfloat16)
                x = torch.randn(2, 3, 128).bfloat16()
                assert torch.equal(module.projection()(x), module(x))


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("act_order", [True, False])
def test_a_state_dict_is_portable_whatever_the_layout(bits: int, act_order: bool) -> None:
    weight = packed(bits, act_order=act_order)
    module = nn.ModuleDict({"proj": QuantLinear(weight, torch.randn(32))})
    for dtype in (torch.float32, torch.bfloat16):
        state = module.to(dtype).state_dict()
        assert set(state) == {f"proj.{name}" for name in (*weight.tensors, "bias")}
        assert all(torch.equal(state[f"proj.{name}"], tensor) for name, tensor in weight.tensors.items())
        assert isinstance(module["proj"].weight, Int4PackWeight) == (dtype == torch.bfloat16 and bits != 3)
    assert set(QuantLinear(packed(sym=True), dtype=torch.bfloat16).state_dict()) == {"qweight", "scales"}


@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_a_state_dict_that_is_loaded_is_what_runs(
    saved_in: torch.dtype, dtype: torch.dtype, assign: bool, act_order: bool
) -> None:
    source, target = (QuantLinear(packed(act_order=act_order), torch.randn(32)) for _ in range(2))
    x = torch.randn(2, 128).to(dtype)
    saved = io.BytesIO()
    torch.save(source.to(saved_in).state_dict(), saved)
    saved.seek(0)
    source.to(dtype), target.to(dtype)
    assert not torch.equal(source(x), target(x))
    target.load_state_dict(torch.load(saved, weights_only=True), assign=assign)
    assert isinstance(target.weight, Int4PackWeight) == (dtype == torch.bfloat16)
    assert torch.equal(source(x), target(x)) and same(source.portable(), target.portable())
    # What was laid out is what moves from now on, too.
    target.to(torch.bfloat16 if dtype == torch.float32 else torch.float32)
    assert same(source.portable(), target.portable())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_without_memory_takes_a_checkpoint_and_stays_with_it(dtype: torch.dtype) -> None:
    source = QuantLinear(packed(), torch.randn(32), dtype=dtype)
    target = QuantLinear(packed(), torch.randn(32), dtype=dtype).to("meta")
    target.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 128).to(dtype)
    assert type(target.weight) is type(source.weight) and torch.equal(target(x), source(x))
    assert torch.equal(target.to(torch.float32)(x.float()), source.to(torch.float32)(x.float()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing(dtype: torch.dtype) -> None:
    module = QuantLinear(packed(), dtype=dtype)
    weight, kind = module.portable().map(torch.clone), type(module.weight)
    state = module.state_dict()
    with pytest.raises(RuntimeError, match="scales"):
        module.load_state_dict({name: tensor for name, tensor in state.items() if name != "scales"})
    with pytest.raises(ValueError, match="^qweight: got 'torch.int64'"):
        module.load_state_dict(state | {"qweight": state["qweight"].long()}, assign=True)
    assert same(module.portable(), weight) and type(module.weight) is kind
    assert set(module._buffers) == {"_activations", *module.weight.tensors}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", ["all tensors", "the weight"])
def test_a_move_that_fails_leaves_the_module_whole(
    dtype: torch.dtype, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = QuantLinear(packed(act_order=True), dtype=dtype)
    x, buffers = torch.randn(2, 128).to(dtype), set(module._buffers)
    before, other = module(x), torch.float32 if dtype == torch.bfloat16 else torch.bfloat16

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        if at == "all tensors":
            module._apply(fails)
        else:
            patch.setattr(module, "_laid_out", fails)
            module.to(other)
    assert set(module._buffers) == buffers and torch.equal(module(x), before)
    # The next move is a move, and not one that seems to have happened.
    module.to(other)
    assert isinstance(module.weight, Int4PackWeight) == (other == torch.bfloat16)


def test_a_move_that_changes_nothing_unpacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = QuantLinear(packed(act_order=True), torch.randn(32), dtype=torch.bfloat16)
    held = module.weight
    monkeypatch.setattr(Int4PackWeight, "unpack", lambda self: pytest.fail("unpacked"))
    for move in (module.cpu, module.bfloat16, module.requires_grad_, module.eval):
        assert move().weight is held and module._buffers["packed"] is held.packed
    with pytest.raises(pytest.fail.Exception, match="unpacked"):
        module.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_copy_is_another_module(dtype: torch.dtype) -> None:
    module = QuantLinear(packed(act_order=True), torch.randn(32), dtype=dtype)
    x = torch.randn(2, 128).to(dtype)
    before, copied = module(x), copy.deepcopy(module)
    assert torch.equal(copied(x), before)
    mine = {tensor.data_ptr() for tensor in module.weight.tensors.values()}
    theirs = copied.weight.tensors
    assert not mine & {tensor.data_ptr() for tensor in theirs.values()}
    # Its buffers are its weight's own tensors, so that what is loaded into them counts.
    assert all(copied._buffers[name] is tensor for name, tensor in theirs.items())
    for tensor in copied.buffers():
        tensor.zero_()
    assert torch.equal(module(x), before)


def test_moving_to_another_device_takes_all_along() -> None:
    module = QuantLinear(packed(act_order=True), torch.randn(32)).to("meta")
    assert {t.device.type for t in [*module.buffers(), *module.parameters(), *module.weight.tensors.values()]} == {
        "meta"
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_footprint_that_transformers_tells(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    quantize_(model, RTNConfig(4, 32), progress=False)
    rotary = sum(b.nbytes for n, b in model.named_buffers() if "inv_freq" in n)
    assert model.get_memory_footprint() == weight_bytes(model) + rotary


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [RTNConfig(4, 32), RTNConfig(8, 32, True), RTNConfig(3, 16), GPTQConfig(4, 32)])
def test_greedy_tokens_of_the_decoder_are_those_of_transformers(dtype: torch.dtype, config: object) -> None:
    model = tiny_model().to(dtype)
    prompt = torch.randint(0, 256, (1, 12))
    quantize_(model, config, torch.randint(0, 256, (4, 32)), modules_to_not_convert=(), progress=False)
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer.weight, Int4PackWeight) == (dtype == torch.bfloat16 and config.bits != 3)
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, pad_token_id=0
    )
    got = Decoder(model).generate(prompt, max_new_tokens=24).sequences
    if dtype == torch.float32:
        assert torch.equal(got, expected)
    else:
        assert_equal_but_for_ties(model, got, expected)


def assert_equal_but_for_ties(model: nn.Module, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Two orders of rounding in bfloat16: where the two part, both took one of the highest logits."""
    differ = (got != expected)[0].nonzero()
    if len(differ):
        first = int(differ[0])
        with torch.no_grad():
            logits = model(got[:, :first]).logits[0, -1].float()
        mine, theirs = logits[got[0, first]], logits[expected[0, first]]
        assert min(mine, theirs) >= logits.max() - 2**-6 * logits.abs().max()
        assert first > 14


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_looks_up_what_its_rows_stand_for(bits: int, dtype: torch.dtype) -> None:
    model = tiny_model(tie_word_embeddings=True).to(dtype)
    table = model.model.embed_tokens.weight.clone()
    quantize_embedding_(model, RTNConfig(bits, 16))
    embedding = model.get_input_embeddings()
    expected = round_to_nearest(table, RTNConfig(bits, 16)).dequantize(dtype)
    for ids in (torch.randint(0, 256, (2, 7)), torch.tensor(3), torch.arange(256), torch.zeros(0, 4, dtype=torch.long)):
        out = embedding(ids)
        assert out.dtype == dtype and torch.equal(out, F.embedding(ids, expected))
    with pytest.raises(IndexError):
        embedding(torch.tensor([256]))
    # The head of a tied model goes with it, over the same codes.
    assert same(model.lm_head.portable(), embedding.portable())
    assert model(torch.randint(0, 256, (1, 5))).logits.dtype == dtype


def test_a_tied_head_and_the_embedding_share_one_packed_table_and_an_untied_head_stays_float() -> None:
    for tied in (True, False):
        model = tiny_model(tie_word_embeddings=tied)
        float_bytes, head = weight_bytes(model), model.lm_head
        quantize_embedding_(model, RTNConfig(4, 16))
        packed_bytes = model.get_input_embeddings().portable().nbytes
        assert weight_bytes(model) == float_bytes - 4 * 256 * 64 + packed_bytes
        assert (model.lm_head is head) is not tied


def test_an_embedding_that_is_moved_looks_up_in_the_new_dtype() -> None:
    embedding = QuantEmbedding(packed(3), torch.float32)
    before = embedding(torch.arange(32))
    after = embedding.to(torch.bfloat16)(torch.arange(32))
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after.float(), before, rtol=2**-7, atol=0)


def test_refused_embeddings() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="^group_size: got 48"):
        quantize_embedding_(model, RTNConfig(4, 48))
    model.model.embed_tokens.weight[3, 3] = float("inf")
    with pytest.raises(ValueError, match="^model: got 'NaN or an infinity in the embedding'"):
        quantize_embedding_(model, RTNConfig(4, 32))
    assert type(model.model.embed_tokens) is nn.Embedding
    model.model.embed_tokens.weight[3, 3] = 0.0
    quantize_embedding_(model, RTNConfig(4, 32))
    with pytest.raises(ValueError, match="^model: got 'an input QuantEmbedding'"):
        quantize_embedding_(model, RTNConfig(4, 32))

    class Scaled(nn.Embedding):
        """As Gemma's: more than a table."""

    model.set_input_embeddings(Scaled(256, 64))
    with pytest.raises(ValueError, match="^model: got 'an input Scaled'"):
        quantize_embedding_(model, RTNConfig(4, 32))


def test_a_replacement_applies_what_its_weight_stands_for_and_keeps_the_bias() -> None:
    linear = nn.Linear(128, 32)
    weight = round_to_nearest(linear.weight.detach(), RTNConfig(4, 32))
    new = packed_replacement(linear, weight)
    assert torch.equal(new.approximation, weight.dequantize())
    assert torch.equal(new.module.bias, linear.bias) and not new.module.bias.requires_grad


def test_what_is_no_packed_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="^weight: got 'Tensor'"):
        QuantLinear(torch.zeros(2, 2))


def test_the_text_of_a_module_names_its_format() -> None:
    assert repr(QuantLinear(packed())) == "QuantLinear(128, 32, bits=4, group_size=32)"
    module = QuantLinear(packed(act_order=True))
    assert "act-order" in repr(module) and "act-order" in repr(module.to(torch.bfloat16))


def test_decoder_reads_a_packed_embedding_and_head():
    model = tiny_model()
    quantize_(model, RTNConfig(bits=4, group_size=16), modules_to_not_convert=(), progress=False)
    quantize_embedding_(model, RTNConfig(bits=8, group_size=16))
    prompt = torch.arange(1, 9)[None]
    ours = Decoder(model).generate(prompt, max_new_tokens=8).sequences
    theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, theirs)
