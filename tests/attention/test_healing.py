"""Healing a merged model: the loss falls, towards the teacher, and nobody else's weights move."""

import math

import pytest
import torch

from labkit.attention import heal, merge_kv_heads_
from labkit.models import shared_copy, tiny_model
from labkit.quality import kl_divergence, perplexity
from labkit.quantization import RTNConfig, quantize_

IDS = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(1))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def merged(model):
    copied = shared_copy(model)
    merge_kv_heads_(copied, 1)
    return copied


@pytest.mark.parametrize("trainable", ["attention", "layers"])
def test_distillation_brings_a_merged_model_back_towards_its_original(trainable: str) -> None:
    model = tiny_model(num_key_value_heads=4)
    original, student = logits(model), merged(model)
    mlp = student.model.layers[0].mlp.up_proj.weight.clone()
    before = kl_divergence(original, logits(student))
    steps = []
    report = heal(
        student, IDS, teacher=model, steps=40, batch_size=4, learning_rate=3e-3, trainable=trainable, watch=steps.append
    )
    assert kl_divergence(original, logits(student)) < 0.5 * before
    # The first loss is the very distance that the samples of the first batch have.
    assert report.losses[0] == pytest.approx(before, rel=0.5) and report.losses[-1] < 0.6 * report.losses[0]
    assert steps == list(range(41)) and len(report.losses) == 40 and not report.stopped and report.seconds > 0
    assert torch.equal(logits(model), original), "the teacher shares its storage with the student"
    assert torch.equal(student.model.layers[0].mlp.up_proj.weight, mlp) == (trainable == "attention")
    assert not any(p.requires_grad or p.grad is not None for p in student.parameters())


def test_without_a_teacher_it_learns_the_text() -> None:
    student = merged(tiny_model(num_key_value_heads=4))
    before = perplexity(student, IDS.flatten(), 32)
    report = heal(student, IDS, steps=30, batch_size=4, learning_rate=3e-3)
    assert perplexity(student, IDS.flatten(), 32) < 0.5 * before
    assert report.losses[0] == pytest.approx(math.log(before), rel=0.2)


def test_the_time_limit_stops_it_and_a_seed_decides_the_order() -> None:
    model = tiny_model(num_key_value_heads=4)
    stopped = heal(merged(model), IDS, teacher=model, steps=50, time_limit_s=0.0)
    assert stopped.stopped and stopped.losses == ()
    runs = [heal(merged(model), IDS, teacher=model, steps=4, seed=seed).losses for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_what_is_refused() -> None:
    model = tiny_model(num_key_value_heads=4)
    packed = tiny_model()
    quantize_(packed, RTNConfig(8, 16), progress=False)
    cases = [
        (model, {"teacher": model}, "teacher: got"),
        (packed, {}, "model: got .*quantized"),
        (tiny_model().to(torch.bfloat16), {}, "model: got 'torch.bfloat16'"),
        (model, {"trainable": "mlp"}, "trainable: got 'mlp'"),
        (model, {"steps": 0}, "steps: got 0"),
        (model, {"batch_size": 0}, "batch_size: got 0"),
        (model, {"learning_rate": -1}, "learning_rate: got -1"),
        (model, {"compute_dtype": "int8"}, "compute_dtype: got"),
        (model, {"calibration": IDS + 256}, "calibration: got"),
        (torch.nn.Linear(2, 2), {}, "model: got 'Linear'"),
    ]
    for wrong, options, why in cases:
        with pytest.raises(ValueError, match=why):
            heal(wrong, **({"calibration": IDS} | options))
    assert not any(parameter.requires_grad for parameter in model.parameters())
