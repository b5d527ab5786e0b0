"""save_quantized: what is in the folder, what is refused before it exists, and that a crash leaves nothing behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from labkit.models import LoadedModel, load_model, tiny_model
from labkit.quantization import (
    FP8Linear,
    PackedWeight,
    QuantLinear,
    RTNConfig,
    SmoothQuantConfig,
    checkpoint,
    quantize_,
    quantize_embedding_,
    save_quantized,
)
from labkit.quantization.layouts import from_awq, from_compressed_tensors, from_gptq
from labkit.quantization.linear import packed_replacement
from labkit.quantization.rtn import round_to_nearest

FORMATS = ("compressed-tensors", "gptq", "awq")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantized(
    config: RTNConfig | None = None, dtype: torch.dtype = torch.float32, **options: object
) -> LlamaForCausalLM:
    """A tiny model, packed. options: of its config, and `modules_to_not_convert` or `bits_per_module` of quantize_."""
    names = ("modules_to_not_convert", "bits_per_module")
    how = {name: options.pop(name) for name in names if name in options}
    model = tiny_model(**options).to(dtype)
    quantize_(model, config or RTNConfig(4, 32), progress=False, **how)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))


def read(folder: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """`config.json` and all tensors; a name that is in two files fails."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():
                assert name not in found
                found[name] = file.get_tensor(name)
    return json.loads((folder / "config.json").read_text(encoding="utf-8")), found


def of(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}


def put_act_order(model: nn.Module, name: str) -> None:
    """Have one matrix's groups be other than consecutive columns."""
    weight = model.get_submodule(name).portable()
    g_idx = (torch.randperm(weight.in_features) // weight.group_size).int()
    tensors = (weight.qweight, weight.scales, weight.zeros, g_idx)
    packed = PackedWeight(*tensors, weight.bits, weight.group_size, weight.in_features)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, QuantLinear(packed))


@pytest.mark.parametrize("format", FORMATS)
def test_the_folder_holds_what_a_loader_looks_for(format: str, tmp_path: Path) -> None:
    loaded = LoadedModel(quantized(), tokenizer(), "tiny")
    folder = save_quantized(loaded, None, tmp_path / "out", format)
    assert folder == tmp_path / "out"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    config, tensors = read(folder)
    dtype = "bfloat16" if format == "compressed-tensors" else "float16"
    assert config["dtype"] == dtype and config["architectures"] == ["LlamaForCausalLM"]
    assert config["quantization_config"]["quant_method"] == format
    floats = {str(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    assert floats == {f"torch.{dtype}"}
    assert len(tensors) == 2 + 3 + 14 * {"compressed-tensors": 4, "gptq": 4, "awq": 3}[format] + 2
    assert not hasattr(loaded.model.config, "quantization_config")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_packed_matrix_comes_back_bit_by_bit(format: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(dtype=dtype, attention_bias=True)
    _, tensors = read(save_quantized(model, None, tmp_path / "out", format))
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            mine, weight = of(tensors, name), module.portable()
            if format == "gptq":
                found = from_gptq(mine, 4, sym=False, v1=False)
            else:
                found = from_awq(mine) if format == "awq" else from_compressed_tensors(mine, 4)
            assert torch.equal(found.codes(), weight.codes()) and torch.equal(found.zeros, weight.zeros)
            assert torch.equal(found.scales.float(), weight.scales.float())
            assert ("bias" in mine) == name.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))
            assert "bias" not in mine or torch.equal(mine["bias"], module.bias.to(mine["bias"].dtype))
    embedding = tensors["model.embed_tokens.weight"]
    assert torch.equal(embedding, model.model.embed_tokens.weight.to(embedding.dtype))


def loads_alike(model: LlamaForCausalLM, folder: Path) -> dict[str, nn.Module]:
    """Load with transformers: what comes back has the same weights, exactly, and says the same. The model's float
    weights are rounded to bfloat16, as they were saved."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    found, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.randint(0, 256, (1, 24))
    got = found(ids).logits  # unpacks the weights
    modules = dict(found.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            assert torch.equal(modules[name].weight, module.portable().dequantize()), name
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    torch.testing.assert_close(got, model(ids).logits, rtol=1e-4, atol=1e-4)
    return modules


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_compressed_tensors_loads_in_transformers(bits: int, sym: bool, tmp_path: Path) -> None:
    model = quantized(RTNConfig(bits, 32, sym), attention_bias=True, tie_word_embeddings=True)
    loads_alike(model, save_quantized(model, None, tmp_path / "out"))


def test_load_model_makes_a_float_model_of_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model, ids = quantized(RTNConfig(4, 32, sym=False), torch.bfloat16), torch.randint(0, 256, (2, 16))
    folder = save_quantized(model, tokenizer(), tmp_path / "saved")
    loaded = load_model(folder, dtype=torch.float32, device="cpu")
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            assert torch.equal(loaded.model.get_submodule(name).weight, module.portable().dequantize())
    # A part of the model alone, which transformers would otherwise not have dequantized.
    assert loaded.model.model(input_ids=ids).last_hidden_state.isfinite().all()
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerFast)


def test_one_group_a_row_and_odd_shapes_load(tmp_path: Path) -> None:
    model = quantized(RTNConfig(4, -1), intermediate_size=56, num_key_value_heads=1, num_attention_heads=2, head_dim=12)
    folder = save_quantized(model, None, tmp_path / "out")
    weights = read(folder)[0]["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert (weights["strategy"], weights["group_size"]) == ("channel", None)
    loads_alike(model, folder)


def test_mixed_bits_load_by_name(tmp_path: Path) -> None:
    eights = {Q_PROJ: 8, "model.layers.1.mlp.down_proj": 8}
    model = quantized(RTNConfig(4, 32), bits_per_module=eights)
    folder = save_quantized(model, None, tmp_path / "out")
    groups = read(folder)[0]["quantization_config"]["config_groups"]
    targets = {group["weights"]["num_bits"]: group["targets"] for group in groups.values()}
    assert len(targets[4]) == 12 and r"re:^model\.layers\.0\.self_attn\.q_proj$" in targets[8] and len(targets[8]) == 2
    loads_alike(model, folder)


def test_matrices_left_in_float_load(tmp_path: Path) -> None:
    model = quantized(modules_to_not_convert=("lm_head", "layers.1.mlp", Q_PROJ))
    folder = save_quantized(model, None, tmp_path / "out")
    ignored = read(folder)[0]["quantization_config"]["ignore"]
    assert Q_PROJ in ignored and "lm_head" in ignored and len(ignored) == 5
    modules = loads_alike(model, folder)
    assert torch.equal(modules[Q_PROJ].weight, model.get_submodule(Q_PROJ).weight)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("packed_head", [True, False])
def test_ties_are_said_as_they_are(tied: bool, packed_head: bool, tmp_path: Path) -> None:
    keep = () if packed_head else ("lm_head",)
    model = quantized(tie_word_embeddings=tied, modules_to_not_convert=keep)
    folder = save_quantized(model, None, tmp_path / "out")
    config, tensors = read(folder)
    assert config["tie_word_embeddings"] == (tied and not packed_head)
    assert ("lm_head.weight" in tensors) == (not tied and not packed_head)
    assert ("lm_head.weight_packed" in tensors) == packed_head
    assert model.config.tie_word_embeddings == tied
    loads_alike(model, folder)


def test_a_head_that_is_said_to_be_tied_and_is_not_is_saved(tmp_path: Path) -> None:
    model = quantized(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn(256, 64), requires_grad=False)
    config, tensors = read(save_quantized(model, None, tmp_path / "out"))
    assert not config["tie_word_embeddings"] and torch.equal(tensors["lm_head.weight"], model.lm_head.weight.bfloat16())


def test_a_float16_model_is_saved_in_float16(tmp_path: Path) -> None:
    config, tensors = read(save_quantized(quantized(dtype=torch.float16), None, tmp_path / "out"))
    assert config["dtype"] == "float16" and tensors["model.norm.weight"].dtype == torch.float16


def test_gptq_says_what_was_stored(tmp_path: Path) -> None:
    said, _ = read(save_quantized(quantized(RTNConfig(4, 32, True)), None, tmp_path / "sym", "gptq"))
    assert said["quantization_config"] == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
    }
    model = quantized(RTNConfig(8, -1), modules_to_not_convert=("lm_head", "layers.1.mlp"))
    said, _ = read(save_quantized(model, None, tmp_path / "asym", "gptq"))
    stored = said["quantization_config"]
    assert (stored["sym"], stored["checkpoint_format"], stored["bits"], stored["group_size"]) == (
        False,
        "gptq_v2",
        8,
        -1,
    )
    assert set(stored["dynamic"]) == {rf"-:^model\.layers\.1\.mlp\.{part}_proj$" for part in ("gate", "up", "down")}
    assert len(stored["modules_in_block_to_quantize"][0]) == 11


def test_gptq_keeps_act_order(tmp_path: Path) -> None:
    model = quantized()
    put_act_order(model, Q_PROJ)
    config, tensors = read(save_quantized(model, None, tmp_path / "out", "gptq"))
    assert config["quantization_config"]["desc_act"] is True
    weight = model.get_submodule(Q_PROJ).portable()
    assert torch.equal(tensors[f"{Q_PROJ}.g_idx"], weight.g_idx)
    assert torch.equal(from_gptq(of(tensors, Q_PROJ), 4, sym=False, v1=False).dequantize(), weight.dequantize())


def test_awq_says_what_was_stored(tmp_path: Path) -> None:
    said, tensors = read(save_quantized(quantized(RTNConfig(4, 32, True)), None, tmp_path / "sym", "awq"))
    stored = said["quantization_config"]
    assert (stored["zero_point"], stored["version"], stored["modules_to_not_convert"]) == (True, "gemm", None)
    assert {word & 0xFFFFFFFF for word in tensors[f"{Q_PROJ}.qzeros"].flatten().tolist()} == {0x88888888}
    model = quantized(modules_to_not_convert=("lm_head", Q_PROJ))
    said, _ = read(save_quantized(model, None, tmp_path / "part", "awq"))
    assert said["quantization_config"]["modules_to_not_convert"] == [Q_PROJ, "lm_head"]


def int8() -> LlamaForCausalLM:
    model = tiny_model()
    quantize_(model, SmoothQuantConfig(), torch.randint(0, 256, (2, 16)), progress=False)
    return model


def fp8() -> LlamaForCausalLM:
    """With one such layer beside packed ones, also where PyTorch has no FP8 matmul."""
    model = quantized()
    new = FP8Linear(torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.ones(64))
    model.model.layers[0].self_attn.q_proj = new
    return model


def act_order() -> LlamaForCausalLM:
    model = quantized()
    put_act_order(model, Q_PROJ)
    return model


def packed_embedding() -> LlamaForCausalLM:
    model = quantized()
    quantize_embedding_(model, RTNConfig(4, 32))
    return model


def odd_matrix(n: int, k: int) -> LlamaForCausalLM:
    """With one matrix of another shape; such a model does not run, and is only to be saved."""
    model = quantized(RTNConfig(4, -1))
    linear = nn.Linear(k, n, bias=False)
    new = packed_replacement(linear, round_to_nearest(linear.weight, RTNConfig(4, -1))).module
    model.model.layers[0].self_attn.q_proj = new
    return model


REFUSED: dict[str, tuple[Callable[[], LlamaForCausalLM], str, str]] = {
    "nothing packed": (tiny_model, "gptq", r"LlamaForCausalLM without packed.*quantize_\(model"),
    "packed embedding": (
        packed_embedding,
        "compressed-tensors",
        r"embed_tokens, a QuantEmbedding.*before quantize_emb",
    ),
    "int8": (int8, "gptq", r"q_proj, a Int8Linear.*rounds its inputs"),
    "fp8": (fp8, "awq", r"q_proj, a FP8Linear.*integers"),
    "awq 8 bits": (lambda: quantized(RTNConfig(8, 32)), "awq", r"q_proj of 8 bits.*4 with format='awq'"),
    "awq act-order": (act_order, "awq", r"q_proj with act-order.*format='gptq' takes act-order"),
    "awq odd group": (
        lambda: quantized(RTNConfig(4, 48), hidden_size=96, intermediate_size=96),
        "awq",
        "group_size 48",
    ),
    "awq width": (lambda: odd_matrix(12, 64), "awq", "q_proj with 12 output features.*multiple of 8"),
    "awq head": (lambda: quantized(modules_to_not_convert=()), "awq", "a packed lm_head.*modules_to_not_convert"),
    "gptq head": (lambda: quantized(modules_to_not_convert=()), "gptq", "a packed lm_head.*modules_to_not_convert"),
    "gptq width": (lambda: odd_matrix(12, 64), "gptq", "q_proj with 12 output features of 4 bits"),
    "gptq depth": (lambda: odd_matrix(16, 60), "gptq", "q_proj with 60 input features of 4 bits"),
    "gptq mixed": (lambda: quantized(bits_per_module={Q_PROJ: 8}), "gptq", r"bits 8 in .*q_proj, 4 in .*compressed"),
    "awq mixed": (lambda: quantized(bits_per_module={Q_PROJ: 8}), "awq", "q_proj of 8 bits"),
    "ct act-order": (act_order, "compressed-tensors", r"q_proj with act-order.*format='gptq' takes it"),
}


@pytest.fixture
def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal comes before the first byte, not as a failure that is cleared away."""
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: pytest.fail("writing began"))


@pytest.mark.usefixtures("nothing_is_written")
@pytest.mark.parametrize("case", REFUSED)
def test_what_a_layout_cannot_hold_is_refused_before_anything_is_written(case: str, tmp_path: Path) -> None:
    make, format, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"model: got .*{message}"):
        save_quantized(make(), None, tmp_path / "out", format)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("group", [-1, 16, 32, 64])
def test_awq_takes_these_groups(group: int, tmp_path: Path) -> None:
    config, _ = read(save_quantized(quantized(RTNConfig(4, group)), None, tmp_path / "out", "awq"))
    assert config["quantization_config"]["group_size"] == group


def test_mixed_groups_load_and_other_layouts_refuse_them(tmp_path: Path) -> None:
    model = quantized()
    model.model.layers[0].self_attn.q_proj = odd_matrix(64, 64).model.layers[0].self_attn.q_proj
    for format in ("gptq", "awq"):
        with pytest.raises(
            ValueError, match="model: got 'group_size 64 in .*q_proj, 32 in .*k_proj'; takes one group_size"
        ):
            save_quantized(model, None, tmp_path / "out", format)
    folder = save_quantized(model, None, tmp_path / "out")
    groups = read(folder)[0]["quantization_config"]["config_groups"].values()
    assert [(g["weights"]["strategy"], g["weights"]["group_size"]) for g in groups] == [
        ("channel", None),
        ("group", 32),
    ]
    loads_alike(model, folder)


@pytest.mark.usefixtures("nothing_is_written")
@pytest.mark.parametrize(("name", "value"), [("model.norm.weight", 1e5), ("model.embed_tokens.weight", torch.inf)])
def test_float_weights_beyond_float16_are_refused(name: str, value: float, tmp_path: Path) -> None:
    model = quantized()
    model.get_parameter(name).data.view(-1)[3] = value
    with pytest.raises(ValueError, match=f"model: got '{name} with values up to .*; takes float weights that float16"):
        save_quantized(model, None, tmp_path / "out", "awq")
    assert not any(tmp_path.iterdir())


def test_scales_beyond_float16_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantized()
    write = checkpoint._write_shards
    monkeypatch.setattr(checkpoint, "_write_shards", lambda *_: pytest.fail("writing began"))
    model.get_submodule(Q_PROJ).portable().scales[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"a scale of .* in model\.layers\.0\.self_attn\.q_proj"):
        save_quantized(model, None, tmp_path / "out", "gptq")
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(checkpoint, "_write_shards", write)
    save_quantized(model, None, tmp_path / "out")  # bfloat16 holds it


def test_arguments_are_checked(tmp_path: Path) -> None:
    model = quantized()
    wrong = {
        "format": (model, None, tmp_path / "x", "gguf"),
        "model": (nn.Linear(2, 2), None, tmp_path / "x", "gptq"),
        "tokenizer": (model, "smollm2", tmp_path / "x", "gptq"),
        "path": (model, None, 3, "gptq"),
    }
    for field, arguments in wrong.items():
        with pytest.raises(ValueError, match=f"^{field}: got"):
            save_quantized(*arguments)
    with pytest.raises(ValueError, match="^max_shard_bytes: got 0"):
        save_quantized(model, None, tmp_path / "x", max_shard_bytes=0)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("format", FORMATS)
def test_shards_hold_every_tensor_once(format: str, tmp_path: Path) -> None:
    model = quantized()
    whole = save_quantized(model, None, tmp_path / "whole", format)
    folder = save_quantized(model, None, tmp_path / "parts", format, max_shard_bytes=20_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))] and len(files) > 3
    config, tensors = read(folder)
    expected = read(whole)
    assert config == expected[0] and tensors.keys() == expected[1].keys()
    assert all(torch.equal(tensors[name], expected[1][name]) for name in tensors)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    # No two neighbours would fit into one file.
    assert len(files) <= 2 * total / 20_000 + 1
    for file in files:
        with safe_open(folder / file, "pt") as shard:
            names = list(shard.keys())
            assert names and all(index["weight_map"][name] == file for name in names)
            sizes = [shard.get_tensor(name).nbytes for name in names]
            # A tensor that is larger than the limit has a file of its own.
            assert sum(sizes) <= 20_000 or len(names) == 1
    assert index["weight_map"].keys() == tensors.keys()


def test_shards_load_in_transformers(tmp_path: Path) -> None:
    model = quantized()
    loads_alike(model, save_quantized(model, None, tmp_path / "out", max_shard_bytes=20_000))


@pytest.mark.parametrize("broken", ["second shard", "config", "tokenizer", "interrupt"])
@pytest.mark.parametrize("existed", [True, False])
def test_a_crash_leaves_the_target_as_it_was(
    broken: str, existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = quantized(), tokenizer()
    error = KeyboardInterrupt if broken == "interrupt" else OSError
    calls = []

    def fail(*args: object, **kwargs: object) -> None:
        # What was written so far lies beside the target, not in it.
        assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
        assert any(path.name.startswith(".out.") for path in tmp_path.iterdir())
        raise error("no space left")

    def save_one(*args: object, **kwargs: object) -> None:
        calls.append(args)
        return fail() if len(calls) == 2 else original(*args, **kwargs)

    original = checkpoint.save_file
    if broken in ("second shard", "interrupt"):
        monkeypatch.setattr(checkpoint, "save_file", save_one)
    elif broken == "config":
        monkeypatch.setattr(type(model.config), "save_pretrained", fail)
    else:
        monkeypatch.setattr(type(words), "save_pretrained", fail)
    if existed:
        (tmp_path / "out").mkdir()
    with pytest.raises(error, match="no space left"):
        save_quantized(model, words, tmp_path / "out", max_shard_bytes=20_000)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if existed else [])
    assert not existed or not any((tmp_path / "out").iterdir())
    monkeypatch.undo()
    save_quantized(model, words, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    model = quantized()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for name in ("full", "file"):
        with pytest.raises(
            ValueError, match=rf"^path: got '.*{name}'; takes a folder that does not exist yet, or an empty"
        ):
            save_quantized(model, None, tmp_path / name)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["file", "full", "full/notes.txt"]
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    save_quantized(model, None, str(tmp_path / "new" / "deep" / "er"))
    assert (tmp_path / "new" / "deep" / "er" / "config.json").exists()


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = quantized(dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    for format in FORMATS:
        save_quantized(model, None, tmp_path / format, format)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert model.config.to_dict() == config
