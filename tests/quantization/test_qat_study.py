"""The comparison of a trained quantized model with its start, the float model and the float model tuned alike."""

import dataclasses
import types

import pytest
import torch

from labkit.models import LoadedModel, tiny_model
from labkit.quality import kl_divergence, perplexity
from labkit.quantization import QATConfig, quantize_
from labkit.quantization.gptq import GPTQConfig
from labkit.quantization.qat_study import RECORDED, VARIANTS, QATStudy, float_control, qat_study, recorded_study

CONFIG = QATConfig(
    group_size=32,
    trainable="codes and scales",
    steps=12,
    batch_size=2,
    learning_rate=1e-3,
    scale_learning_rate=0.01,
    start_samples=4,
)


class Letters:
    """Ids of a text's characters, which the tiny model's vocabulary holds."""

    def __call__(self, text, return_tensors=None, **_):
        ids = [ord(letter) % 256 for letter in text[:20_000]]
        return types.SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors else ids)


def load(name="tiny", dtype=torch.float32):
    torch.manual_seed(0)
    model = tiny_model(hidden_size=64, intermediate_size=128).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(3)
    return LoadedModel(model.to(dtype), Letters(), name)


@pytest.fixture(scope="module")
def study():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.quantization.qat_study.load_model", load)
        options = {
            "n_samples": 8,
            "seq_len": 32,
            "eval_windows": 3,
            "other_windows": 2,
            "n_points": 4,
            "control_learning_rate": 1e-3,
            "variants": {"scales": {"trainable": "scales"}, "next token": {"distillation": 0.0}},
        }
        return qat_study("tiny", CONFIG, **options, progress=False)


def ids_of(text_name, windows):
    from labkit.corpora import load_text

    return Letters()(load_text(text_name), "pt").input_ids[0, : windows * 32].view(windows, 32)


def test_the_curve_starts_at_the_start_and_ends_at_the_packed_model(study):
    from labkit.corpora import load_text, token_batches

    loaded = load()
    assert study.baseline == pytest.approx(perplexity(loaded.model, ids_of("pydoc", 3).flatten(), 32))
    samples = token_batches(Letters(), load_text("pydoc", "calibration"), 8, 32, 0)
    with torch.no_grad():
        wanted = loaded.model(ids_of("python-source", 2)).logits
        quantize_(loaded.model, GPTQConfig(3, 32), samples[:4], progress=False)
        found = loaded.model(ids_of("python-source", 2)).logits
    assert [point.step for point in study.points] == [0, 4, 8, 12]
    assert study.points[0].perplexity == pytest.approx(
        perplexity(loaded.model, ids_of("pydoc", 3).flatten(), 32), rel=1e-4
    )
    assert study.kl_before["python-source"] == pytest.approx(kl_divergence(wanted, found), rel=1e-3)
    assert study.points[-1].perplexity == pytest.approx(study.perplexity, rel=1e-3)
    assert [point.loss for point in study.points] == [None, *(study.losses[i] for i in (3, 7, 11))]
    seconds = [point.seconds for point in study.points]
    assert seconds[0] == 0.0 and seconds == sorted(seconds) and seconds[-1] <= study.seconds + 1


def test_it_is_nearer_to_the_float_model_on_the_text_it_was_trained_on(study):
    assert study.kl_after["pydoc"] < study.kl_before["pydoc"] and len(study.losses) == 12
    start = study.points[0].perplexity
    assert study.recovered == pytest.approx((start - study.perplexity) / (start - study.baseline))


def test_variants_begin_where_the_first_did_and_go_their_own_way(study):
    alone, next_token = study.variants["scales"], study.variants["next token"]
    # Step sizes alone leave each code where it was; the straight-through estimator does not.
    assert alone.code_changes == 0.0 < study.code_changes < 0.5
    assert alone.losses[0] == study.losses[0] and alone.points[0] == study.points[0]
    assert alone.losses[1:] != study.losses[1:] and alone.perplexity != study.perplexity
    # Cross-entropy is above what it is to the float model itself.
    assert min(next_token.losses) > max(alone.losses) and len(next_token.losses) == 12
    assert [point.step for point in next_token.points] == [0, 4, 8, 12]
    assert set(next_token.kl_after) == {"pydoc", "python-source"}


def test_the_control_is_trained_on_the_same_batches_in_float(study):
    assert study.control.perplexity_before == study.baseline
    assert study.control.perplexity_after < study.baseline and len(study.control.losses) == 12
    loaded = load()
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj")
    linears = {name: loaded.model.get_submodule(name) for name in names}
    config = dataclasses.replace(CONFIG, steps=1, batch_size=1)
    float_control(loaded.model, linears, config, ids_of("pydoc", 3), 0.005, False)
    moved = {name: (loaded.model.state_dict()[name] - before[name]).abs().max().item() for name in before}
    # Adam's first step is the rate itself.
    assert {name: step for name, step in moved.items() if step} == {
        f"{names[0]}.weight": pytest.approx(0.005, rel=1e-3),
        f"{names[1]}.weight": pytest.approx(0.005, rel=1e-3),
    }
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_what_is_saved_is_read_back(study, tmp_path):
    path = tmp_path / "study.json"
    study.save(path, machine="here", commit="0")
    assert recorded_study(path) == dataclasses.replace(study, provenance={"machine": "here", "commit": "0"})


def test_windows_that_are_not_there_and_a_saved_training_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.quantization.qat_study.load_model", load)
    with pytest.raises(
        ValueError, match="windows: got 700; takes at most the 625 windows of 32 tokens that pydoc holds"
    ):
        qat_study("tiny", CONFIG, n_samples=8, seq_len=32, eval_windows=700)
    with pytest.raises(ValueError, match=r"variants\['other'\]: got 'bits'; takes distillation, learning_rate"):
        qat_study("tiny", CONFIG, variants={"other": {"bits": 4}})
    with pytest.raises(ValueError, match="config.state_path: got"):
        qat_study("tiny", dataclasses.replace(CONFIG, state_path=tmp_path / "x"))


def test_the_recorded_run_reaches_what_the_course_promises():
    run = recorded_study(RECORDED)
    assert isinstance(run, QATStudy) and {"machine", "date", "commit"} <= set(run.provenance)
    assert run.model == "smollm2-135m" and run.config["bits"] == 3 and run.seconds <= 600
    assert run.recovered >= 1 / 3 and run.bits_per_weight < 3.6
    # Not by learning the text alone: it is nearer to the float model on another kind of text too.
    assert run.kl_after["python-source"] < run.kl_before["python-source"]
    assert len(run.losses) == run.config["steps"] == len(run.control.losses)
    # Where others were recorded beside it, they are as many steps long.
    assert set(run.variants) <= set(VARIANTS)
    assert all(len(found.losses) == len(run.losses) for found in run.variants.values())
