import csv
import io
import re

import pytest

from labkit.labs import _sampling_compute, sampling, sampling_lab
from labkit.labs.sampling import from_cold_to_hot
from tests.labs.sampling_fixtures import PROMPTS, by_hand
from tests.labs.speculative_fixtures import loaded

WAIT_S = 60.0
DEFAULT = {"temperature": 0.8, "top_k": 0, "top_p": 0.9, "prompt": 0, "seed": 0}


@pytest.fixture
def lab(ledger, monkeypatch):
    """The lab over a tiny model, with short texts and a draft that needs no file."""
    monkeypatch.setattr(sampling, "typical_prompt", lambda: PROMPTS[0])
    monkeypatch.setattr(sampling, "load_prompts", lambda kind: {"chat": PROMPTS[1:]}[kind])
    monkeypatch.setattr(sampling, "_DEFAULT_PROPOSER", "int4 copy")
    monkeypatch.setattr(sampling, "_DEFAULT_WEIGHTS", "float32")
    monkeypatch.setattr(sampling, "_NEW_TOKENS", 8)
    lab = sampling_lab(loaded(), device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.controls[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def test_each_control_moves_what_is_known_and_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, temperature=1.6)
    hot = lab.result
    move(lab, top_p=0.5)
    assert lab.result.next_token.kept < hot.next_token.kept and lab.result.next_token.mass_cut <= 0.5
    move(lab, top_k=2)
    assert lab.result.next_token.kept <= 2
    move(lab, top_k=1)
    assert lab.result.next_token.kept == 1 and lab.result.different_texts == 1
    move(lab, seed=3)
    assert [text.seed for text in lab.result.texts] == [3, 4, 5]
    move(lab, prompt=1)
    assert lab.result.prompt_text == "xyz"
    move(lab, proposer="prompt lookup")
    lines = [m for m in ledger.read() if m.name == "sampling_lab.entropy"]
    keys = ("temperature", "top_k", "top_p", "seed", "prompt", "proposer")
    assert [tuple(m.params[key] for key in keys) for m in lines] == [
        (0.8, 0, 0.9, 0, 0, "int4 copy"),
        (1.6, 0, 0.9, 0, 0, "int4 copy"),
        (1.6, 0, 0.5, 0, 0, "int4 copy"),
        (1.6, 2, 0.5, 0, 0, "int4 copy"),
        (1.6, 1, 0.5, 0, 0, "int4 copy"),
        (1.6, 1, 0.5, 3, 0, "int4 copy"),
        (1.6, 1, 0.5, 3, 1, "int4 copy"),
        (1.6, 1, 0.5, 3, 1, "prompt lookup"),
    ]
    assert [m.value for m in lines] == [r.next_token.bits for r in lab.finished]
    move(lab, weights="int4")
    assert lab.result.dtype == "bfloat16"
    lab.reset()
    assert lab.wait(WAIT_S) and len(lab.finished) == 1
    assert {name: lab.spec.controls[name].value for name in DEFAULT} == DEFAULT


def test_the_texts_are_shown_as_they_come_above_the_figure(lab, monkeypatch):
    seen = []
    monkeypatch.setattr(sampling, "texts_html", lambda r: seen.append(sum(len(t.tokens) for t in r.texts)) or "shown")
    move(lab, temperature=1.0)
    assert seen[0] == 0 and seen == sorted(seen) and seen[-1] == 24 and lab.texts.value == "shown"
    assert list(lab.children).index(lab.texts) == list(lab.children).index(lab.figure) - 1


def test_the_csv_holds_every_figure_with_its_label(lab):
    move(lab, top_k=5)
    rows = list(csv.DictReader(io.StringIO(lab.to_csv())))
    mine = {row["quantity"]: row for row in rows if row["top_k"] == "5"}
    assert float(mine["entropy"]["value"]) == lab.result.next_token.bits and mine["entropy"]["label"] == "MEASURED"
    assert mine["expected_acceptance"]["label"] == "MODELLED"
    drawn = [row for row in rows if row["top_k"] == "5" and row["quantity"] == "probability"]
    assert [float(row["value"]) for row in drawn] == [one.drawn for one in lab.result.next_token.likeliest]
    assert mine["text of seed 2"]["text"] == "".join(lab.result.texts[2].pieces)


def test_the_guess_is_answered_by_both_temperatures_of_one_setting():
    assert from_cold_to_hot([by_hand(0.0, 0.8), by_hand(1.2, 0.4, top_k=5), by_hand(0.8)]) is None
    pair = [by_hand(0.0, 0.9, 0.9), by_hand(1.2, 0.4, 0.5)]
    answer = from_cold_to_hot([*pair, by_hand(0.8, top_k=5)])
    assert answer == ("it falls: 90% at 0, 40% at 1.2 (Σ min(p, q): 90% and 50%). Now set top_k to 1.")
    assert "it rises, by less than so few tested tokens can tell (± " in from_cold_to_hot(
        [by_hand(0.0, 0.5), by_hand(1.2, 0.6)]
    )
    one = from_cold_to_hot([*pair, by_hand(1.2, 0.9, top_k=1)])
    assert one.endswith("With top_k 1 at 1.2: 90%, greedy again.")
    # Measured again: as it came out last.
    assert from_cold_to_hot([*pair, by_hand(1.2, 0.9)]).startswith("it stays: 90% at 0, 90%")


def test_a_failure_is_shown_and_the_next_move_works(lab, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of <memory>")

    with monkeypatch.context() as patch:
        patch.setattr(_sampling_compute, "streamed", fail)
        lab.spec.knobs["top_k"].value = 10
        assert lab.wait(WAIT_S)
    assert "out of &lt;memory&gt;" in lab.status.text and isinstance(lab.error, RuntimeError)
    move(lab, top_k=20)
    assert lab.result.params.top_k == 20 and "labkit-error" not in lab.status.text


def test_the_knobs_offer_what_generation_takes(lab):
    values = {name: [value for _, value in knob.options] for name, knob in lab.spec.knobs.items()}
    assert values["temperature"][0] == 0.0 and values["temperature"][-1] == 2.0
    assert values["top_k"][:2] == [0, 1] and values["top_k"][-1] == 100
    assert values["top_p"][0] == 0.1 and values["top_p"][-1] == 1.0
    assert len(lab.spec.knobs) == 3 and lab.spec.knobs["top_k"].options[0][0] == "off"


@pytest.mark.parametrize(
    ("arguments", "names"), [({"device": "tpu"}, "device: got 'tpu'"), ({"model": 3}, "model: got 3; takes a model's")]
)
def test_bad_arguments_are_named(arguments, names):
    with pytest.raises(ValueError, match="^" + re.escape(names)):
        sampling_lab(**arguments)
