"""data/models.yaml: shapes that transformers builds, counts that agree with them, names that are found."""

import pytest
import torch

from labkit.models import list_models, model_config

NAMES = list(list_models())


def parameter_count(config) -> int:
    """Counted by the modules themselves, on the meta device; tied weights once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_the_published_parameter_count_follows_from_the_shape(name):
    config = model_config(name)
    # Two layers are enough to know what one weighs: building 126 of them takes long.
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    one = parameter_count(config)
    config.num_hidden_layers = 2
    per_layer = parameter_count(config) - one
    assert one + (layers - 1) * per_layer == list_models()[name].parameters


def test_what_the_course_quotes():
    """REFERENCES: KV bytes a token of Llama-3.1-8B and Llama-2-7B in 16 bits; 140 and 810 GB of weights."""
    for name, expected in (("llama-3.1-8b", 131_072), ("llama-2-7b", 524_288)):
        config = model_config(name)
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        assert 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2 == expected
    assert round(list_models()["llama-3.1-70b"].parameters * 2 / 1e9) == 141
    assert round(list_models()["llama-3.1-405b"].parameters * 2 / 1e9) == 812


def test_the_default_models_shape_is_that_of_its_file(default_model):
    config, stored = model_config("smollm2-135m"), default_model.model.config
    fields = [field for field in list_models()["smollm2-135m"].shape if field not in ("rope_theta", "rms_norm_eps")]
    assert {field: getattr(config, field) for field in fields} == {field: getattr(stored, field) for field in fields}
    assert config.rope_parameters == stored.rope_parameters
    assert config.rms_norm_eps == pytest.approx(stored.rms_norm_eps, rel=1e-6)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b"])
def test_scaled_rotary_embeddings_keep_their_scaling(name):
    rope = model_config(name).rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == ("llama3", 500000.0)
    assert rope["factor"] == {"llama-3.2-1b": 32.0, "llama-3.1-8b": 8.0}[name]


def test_families_of_tokenizers_have_one_vocabulary():
    sizes = {}
    for info in list_models().values():
        sizes.setdefault(info.tokenizer, set()).add(info.shape["vocab_size"])
    # Qwen pads its embedding to a multiple that grows with the model; its ids are the same.
    assert sizes.pop("qwen2.5") == {151936, 152064}
    assert all(len(vocabularies) == 1 for vocabularies in sizes.values())


def test_the_families_differ_where_they_should():
    assert model_config("qwen2.5-0.5b").model_type == "qwen2" and model_config("qwen3-0.6b").model_type == "qwen3"
    assert not model_config("qwen3-0.6b").attention_bias
    assert model_config("qwen3-0.6b").head_dim * 16 != model_config("qwen3-0.6b").hidden_size


def test_an_unknown_name_lists_the_near_ones():
    with pytest.raises(ValueError, match=r"name: got 'llama-3\.1-8'; takes one of .*did you mean llama-3\.1-8b"):
        model_config("llama-3.1-8")
    with pytest.raises(ValueError, match="name: got 7; takes one of smollm2-135m"):
        model_config(7)
    with pytest.raises(TypeError):
        list_models()["mine"] = None
