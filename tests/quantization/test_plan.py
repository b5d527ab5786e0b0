"""What is to be quantized: names that are left alone, and what is refused before anything is touched."""

import pytest
import torch
from torch import nn

from labkit.models import tiny_model
from labkit.quantization import RTNConfig, quantize_
from labkit.quantization.plan import plan


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("down_prj", "did you mean down_proj"),
        ("mlp.down_prj", r"did you mean .*down_proj"),
        ("lm_haed", "did you mean lm_head"),
        ("proj", "one of model, embed_tokens, layers, self_attn, q_proj"),
        ("ayers.1", "did you mean layers"),
        ("layers.0.self", "such as one of model"),
        ("layers.7", "such as one of model"),
        ("model.layers.0.mlp.down_proj.weight", "such as one of model"),
        ("", "such as one of model"),
    ],
)
def test_a_name_that_matches_no_module_is_refused(part: str, says: str) -> None:
    """Parts of a name are whole words; a slip would quantize what was to stay in float."""
    model = tiny_model()
    with pytest.raises(ValueError, match=f"^modules_to_not_convert: got {part!r}; takes a module's name.*{says}"):
        quantize_(model, RTNConfig(4, 32), modules_to_not_convert=("lm_head", part), progress=False)
    assert not any(getattr(module, "is_quantized", False) for module in model.modules())


def test_names_that_match_a_module_that_is_no_matrix_are_taken() -> None:
    model = tiny_model()
    everything = plan(model, ()).linears
    assert list(plan(model, ("model.norm", "embed_tokens")).linears) == list(everything)
    assert list(plan(model, ("layers.1", "lm_head")).linears) == list(everything)[:7]


def test_the_default_serves_a_model_whose_head_has_another_name() -> None:
    model = tiny_model()
    model.embed_out = model.lm_head
    del model.lm_head
    assert list(plan(model, ("lm_head",)).outside) == ["embed_out"]
    assert list(plan(model, ("lm_head", "embed_out")).outside) == []


def test_what_is_no_transformers_model_is_refused() -> None:
    for thing in (nn.Linear(4, 4), None, nn.ModuleList()):
        with pytest.raises(ValueError, match="^model: got .*; takes a transformers causal LM"):
            plan(thing, ())


@torch.no_grad()
def test_a_model_that_is_quantized_is_refused() -> None:
    model = tiny_model()
    quantize_(model, RTNConfig(4, 32), modules_to_not_convert=("lm_head", "layers.1"), progress=False)
    with pytest.raises(ValueError, match="^model: got 'a model in which 7 modules are quantized, model.layers.0"):
        plan(model, ())
