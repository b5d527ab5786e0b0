"""What vLLM is said to make of a checkpoint, on the configs that save_quantized writes."""

import json
from pathlib import Path

import pytest

from labkit.models import tiny_model
from labkit.quantization import RTNConfig, check_vllm, quantize_, save_quantized

WIDE = {"hidden_size": 128, "intermediate_size": 256}


def written(folder: Path, config: RTNConfig, format: str, **options: object) -> dict[str, object]:
    """`config.json` of a tiny model whose widths Marlin's tiles divide, unless `options` say otherwise."""
    how = {name: options.pop(name) for name in ("modules_to_not_convert", "bits_per_module") if name in options}
    model = tiny_model(**(WIDE | options))
    quantize_(model, config, progress=False, **how)
    path = save_quantized(model, None, folder / "out", format) / "config.json"
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("config", "format"),
    [
        (RTNConfig(4, 64, True), "gptq"),
        (RTNConfig(8, -1, True), "gptq"),
        (RTNConfig(4, 32), "awq"),
        (RTNConfig(4, 128), "compressed-tensors"),
        (RTNConfig(8, 64, True), "compressed-tensors"),
        (RTNConfig(4, -1), "compressed-tensors"),
    ],
)
def test_what_it_serves(config: RTNConfig, format: str, tmp_path: Path) -> None:
    check = check_vllm(written(tmp_path, config, format))
    assert check.refusals == () and check.notes == ()
    assert repr(check) == "no reason found why vLLM would refuse it"
    assert check == check_vllm(tmp_path / "out") == check_vllm(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("config", "format", "why"),
    [
        (RTNConfig(4, 64), "gptq", "asymmetric GPTQ"),
        (RTNConfig(3, 64, True), "gptq", "GPTQ of 3 bits: it takes 4 or 8"),
        (RTNConfig(4, 16, True), "gptq", "group_size 16"),
        (RTNConfig(4, 16), "awq", "group_size 16"),
        (RTNConfig(3, 32, True), "compressed-tensors", "3 bits: its kernels take 4 or 8"),
        (RTNConfig(8, 32), "compressed-tensors", "asymmetric 8 bits"),
        (RTNConfig(4, 16), "compressed-tensors", "group_size 16"),
    ],
)
def test_what_it_refuses(config: RTNConfig, format: str, why: str, tmp_path: Path) -> None:
    check = check_vllm(written(tmp_path, config, format))
    assert len(check.refusals) == 1 and why in check.refusals[0]
    assert repr(check).startswith(f"refused: {check.refusals[0]}")


def test_matrices_that_it_fuses_must_be_alike(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj"
    mixed = written(tmp_path / "a", RTNConfig(4, 32, True), "compressed-tensors", bits_per_module={name: 8})
    assert "layers.1.self_attn.q_proj" in check_vllm(mixed).refusals[0]
    down = {"model.layers.1.mlp.down_proj": 8}
    alone = written(tmp_path / "b", RTNConfig(4, 32, True), "compressed-tensors", bits_per_module=down)
    assert check_vllm(alone).refusals == ()
    for format in ("compressed-tensors", "gptq", "awq"):
        keep = ("lm_head", name)
        part = written(tmp_path / format, RTNConfig(4, 32, True), format, modules_to_not_convert=keep)
        assert "are not stored alike" in check_vllm(part).refusals[0], format
        keep = ("lm_head", "layers.1.mlp")
        whole = written(tmp_path / f"{format}2", RTNConfig(4, 32, True), format, modules_to_not_convert=keep)
        assert check_vllm(whole).refusals == (), format


def test_a_config_without_its_keys_or_in_float32(tmp_path: Path) -> None:
    config = written(tmp_path, RTNConfig(4, 32, True), "gptq")
    assert check_vllm(config | {"dtype": "float32"}).refusals[0].startswith("the config's dtype")
    del config["quantization_config"]["desc_act"]
    assert check_vllm(config).refusals == ("quantization_config lacks desc_act",)
    with pytest.raises(ValueError, match="config: got 'no quantization_config'"):
        check_vllm({"dtype": "float16"})
    with pytest.raises(ValueError, match="quant_method: got 'fp8'; takes one of gptq, awq, compressed-tensors"):
        check_vllm({"quantization_config": {"quant_method": "fp8"}})


def test_shapes_and_heads_are_noted(tmp_path: Path) -> None:
    shape = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32}
    check = check_vllm(written(tmp_path / "a", RTNConfig(4, 32), "awq", **shape))
    assert check.refusals == () and len(check.notes) == 2
    # 192 inputs are not a multiple of 128; q, k and v make 5 heads of 32 outputs; 256 inputs of down are.
    assert "qkv_proj (192 to 160), o_proj (96 to 192), gate_up_proj (192 to 512) must be padded" in check.notes[0]
    assert "3 heads and 1 KV heads" in check.notes[1]
    few = check_vllm(written(tmp_path / "c", RTNConfig(4, 32), "awq", num_attention_heads=8, num_key_value_heads=2))
    assert few.notes == () and few.refusals == ()
    one = written(tmp_path / "d", RTNConfig(4, 32), "awq", num_attention_heads=8, num_key_value_heads=1)
    assert "128 x 64: qkv_proj (128 to 160) must be padded" in check_vllm(one).notes[0]
    packed = written(tmp_path / "b", RTNConfig(4, 32), "compressed-tensors", modules_to_not_convert=())
    assert [note[:13] for note in check_vllm(packed).notes] == ["a packed head"]


def test_act_order_is_noted(tmp_path: Path) -> None:
    config = written(tmp_path, RTNConfig(4, 32, True), "gptq")
    config["quantization_config"]["desc_act"] = True
    assert check_vllm(config).notes[0].startswith("act-order")
