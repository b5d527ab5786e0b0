import csv
import io
import re

import pytest

from labkit.engine.ladder import RUNGS, Stack
from labkit.labs import _stack_models, stack_lab
from labkit.labs._stack_rungs import RungToggles
from labkit.labs.stack import everything
from tests.labs.stack_fixtures import ALL, by_hand, fix, loaded, texts

WAIT_S = 60.0


@pytest.fixture
def lab(ledger, monkeypatch):
    """The lab over a tiny model, with short answers."""
    fix(monkeypatch)
    monkeypatch.setattr(_stack_models, "read_texts", lambda model: texts())
    lab = stack_lab(loaded(), device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.controls[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def test_each_control_writes_its_parameters_to_the_ledger(lab, ledger):
    lab.spec.knobs["rungs"].buttons["attention"].value = True
    assert lab.wait(WAIT_S)
    move(lab, prompt="long")
    move(lab, num_assistant_tokens=5)
    move(lab, rungs=("step", "speculation"))
    lines = [m for m in ledger.read() if m.name == "stack_lab.speedup"]
    default = ["step", "bfloat16", "int4"]
    keys = ("rungs", "left_out", "prompt", "num_assistant_tokens", "model")
    assert [tuple(m.params[key] for key in keys) for m in lines] == [
        (default, [], "chat", 0, "tiny"),
        ([*default, "attention"], [], "chat", 0, "tiny"),
        ([*default, "attention"], [], "long", 0, "tiny"),
        ([*default, "attention"], [], "long", 0, "tiny"),
        (["step", "speculation"], [], "long", 5, "tiny"),
    ], "γ counts where something drafts"
    assert [m.value for m in lines] == [r.speedup for r in lab.finished]
    lab.reset()
    assert lab.wait(WAIT_S) and len(lab.finished) == 1
    values = {name: knob.value for name, knob in lab.spec.controls.items()}
    assert values == {"rungs": tuple(default), "prompt": "chat", "num_assistant_tokens": 2}
    assert [name for name, button in lab.spec.knobs["rungs"].buttons.items() if button.value] == default


def test_a_rung_that_does_not_go_with_the_others_is_left_out_with_its_reason(lab, ledger):
    buttons = lab.spec.knobs["rungs"].buttons
    lab.spec.knobs["rungs"].value = ("bfloat16", "speculation")
    assert lab.wait(WAIT_S) and lab.error is None
    assert "labkit-error" not in lab.status.text and lab.result.on == ("bfloat16",)
    assert ledger.read()[-1].params["rungs"] == ["bfloat16"]
    assert ledger.read()[-1].params["left_out"] == ["speculation"]
    assert "own step" in lab.spec.knobs["rungs"].reasons.value and "own step" in lab.numbers.value
    assert buttons["speculation"].value and buttons["speculation"].icon == "ban"
    # With the own step it goes.
    buttons["step"].value = True
    assert lab.wait(WAIT_S) and lab.result.on == ("step", "bfloat16", "speculation")
    assert lab.spec.knobs["rungs"].reasons.value == "" and buttons["speculation"].icon == "check"


def test_buttons_and_value_say_the_same():
    toggles = RungToggles(("step", "int4"), lambda asked: {"int8": "<b> for a reason"} if "int8" in asked else {})
    assert list(toggles.buttons) == list(RUNGS)
    assert [b.description for b in toggles.buttons.values() if b.value] == ["own step", "INT4 weights"]
    seen = []
    toggles.observe(lambda change: seen.append(change["new"]), "value")
    toggles.buttons["int8"].value = True
    assert toggles.value == ("step", "int8", "int4"), "in the ladder's order"
    assert "&lt;b&gt; for a reason" in toggles.reasons.value and toggles.buttons["int8"].icon == "ban"
    toggles.everything.click()
    assert toggles.value == ALL and all(button.value for button in toggles.buttons.values())
    toggles.nothing.click()
    assert toggles.value == () and not any(button.value for button in toggles.buttons.values())
    assert len(seen) == 3, "one change a click"
    assert all(button.icon == button.button_style == "" for button in toggles.buttons.values())


def test_the_csv_holds_every_figure_with_its_label(lab):
    move(lab, rungs=("step", "int4"))
    rows = list(csv.DictReader(io.StringIO(lab.to_csv())))
    mine = {row["quantity"]: row for row in rows if row["rungs"] == "step int4"}
    assert float(mine["speedup"]["value"]) == lab.result.speedup and mine["speedup"]["label"] == "MEASURED"
    assert mine["ceiling"]["label"] == mine["step_bytes"]["label"] == "MODELLED"


def test_the_guess_is_answered_once_every_rung_was_asked_for():
    some, full = by_hand("step", "int4", speedup=3.0), by_hand(*ALL, speedup=4.0)
    assert everything([some]) is None
    answer = everything([full, some])
    assert answer.startswith("4x (own step + bfloat16 + INT4 weights") and "speculation (γ 2))" in answer
    assert answer.endswith("The popular ladder says 8x: 2x as much.")
    without = by_hand(*(r for r in ALL if r != "quantized_kv"), left_out={"quantized_kv": "it moves"})
    assert "without INT8 KV cache)" in everything([without])


def test_a_failure_is_shown_and_the_next_move_works(lab, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of <memory>")

    with monkeypatch.context() as patch:
        patch.setattr(Stack, "generate", fail)
        lab.spec.knobs["rungs"].value = ("step",)
        assert lab.wait(WAIT_S)
    assert "out of &lt;memory&gt;" in lab.status.text and isinstance(lab.error, RuntimeError)
    move(lab, rungs=("step", "bfloat16"))
    assert lab.result.on == ("step", "bfloat16") and "labkit-error" not in lab.status.text


def test_a_model_of_16_bits_starts_without_the_rung_that_it_has(ledger, monkeypatch):
    import torch

    fix(monkeypatch)
    monkeypatch.setattr(_stack_models, "read_texts", lambda model: texts())
    half = loaded()
    half.model.to(torch.bfloat16)
    lab = stack_lab(half, device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    assert lab.result.on == ("step", "int4") and not lab.result.left_out


@pytest.mark.parametrize("wrong", [{"model": 3}, {"device": "tpu"}])
def test_a_wrong_argument_is_refused(wrong):
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}: got "):
        stack_lab(**wrong)


def test_the_numbers_say_what_the_set_gives():
    result = by_hand("step", "bfloat16", "int4", "attention", "quantized_kv", "speculation", speedup=4.0)
    shown = {number.key: number for number in result.numbers()}
    assert shown["speedup"].text == "4x faster" and shown["tokens_per_second"].text == "40 tokens/s"
    assert shown["baseline"].text == "10 tokens/s" and "eager attention" in shown["baseline"].note
    # 18 tokens of 10 passes: 1.8 a pass, each of which reads 60 MB at 3 GB/s.
    assert shown["ceiling"].exact == pytest.approx(90.0) and "reached 44%" in shown["ceiling"].note
    assert shown["popular"].text == "8x" and "folk claim" in shown["popular"].note
    assert shown["loss"].text == "+10.0%" and shown["acceptance_rate"].text == "50.0%"
    assert shown["peak_bytes"].note.startswith("25.0% of the baseline's") and shown["tokens_per_call"].text == "1.80"
    both = by_hand("int8", "int4", left_out={"speculation": "no <step>"})
    out = {number.key: number.note for number in both.numbers() if number.key.startswith("out_")}
    assert out == {"out_speculation": "no <step>", "out_int8": "INT4 takes its place"}


def test_the_text_form_tells_the_set_and_its_figures():
    text = by_hand("step", "int4", speedup=2.5).text()
    assert text.splitlines()[0] == "stack_lab: own step + INT4 weights; a short chat prompt, 20 tokens"
    assert re.search(r"speed-up +2.5x faster", text) and "MODELLED" in text and "MEASURED" in text
    assert by_hand().text().startswith("stack_lab: the baseline alone; ")
