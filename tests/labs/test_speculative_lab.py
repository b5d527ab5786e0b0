import csv
import io
import re

import pytest

from labkit.labs import _speculative_steps, speculative, speculative_lab
from labkit.labs._speculative_result import PROPOSERS
from labkit.labs.speculative import fastest_length
from tests.labs.speculative_fixtures import PROMPTS, by_hand, loaded

WAIT_S = 60.0
DEFAULT = {"num_assistant_tokens": 3, "temperature": 0.0, "proposer": "prompt lookup", "prompt": "chat"}

pytestmark = pytest.mark.usefixtures("fixed_speculative")


@pytest.fixture
def lab(ledger, monkeypatch):
    """The lab over a tiny model, with short answers; what drafts at first needs no file."""
    monkeypatch.setattr(speculative, "typical_prompt", PROMPTS.get)
    monkeypatch.setattr(speculative, "_DEFAULT_PROPOSER", "prompt lookup")
    monkeypatch.setattr(speculative, "_NEW_TOKENS", 13)
    lab = speculative_lab(loaded(), device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    return lab


def move(lab, **values) -> None:
    for name, value in values.items():
        lab.spec.controls[name].value = value
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback


def test_each_control_writes_its_parameters_to_the_ledger(lab, ledger):
    move(lab, num_assistant_tokens=0)
    move(lab, num_assistant_tokens=2)
    move(lab, temperature=0.7)
    move(lab, proposer="int4 copy")
    move(lab, prompt="copy_heavy")
    move(lab, weights="int4")
    lines = [m for m in ledger.read() if m.name == "speculative_lab.speedup"]
    keys = ("num_assistant_tokens", "temperature", "proposer", "prompt", "weights", "shape")
    assert [tuple(m.params[key] for key in keys) for m in lines] == [
        (3, 0.0, "prompt lookup", "chat", "int4", "chain"),
        (0, 0.0, "prompt lookup", "chat", "int4", "chain"),
        (2, 0.0, "prompt lookup", "chat", "int4", "chain"),
        (2, 0.7, "prompt lookup", "chat", "int4", "chain"),
        (2, 0.7, "int4 copy", "chat", "int4", "chain"),
        (2, 0.7, "int4 copy", "copy_heavy", "int4", "chain"),
    ], "the weights were int4 already"
    assert [m.value for m in lines] == [r.speedup for r in lab.finished]
    move(lab, weights="float32")
    assert lab.result.dtype == "float32" and ledger.read()[-1].params["weights"] == "float32"
    # A tree is the head's: with another proposer the switch changes nothing that is measured.
    move(lab, shape="tree")
    assert lab.result.params.shape == "chain"
    lab.reset()
    assert lab.wait(WAIT_S) and len(lab.finished) == 1
    assert {name: lab.spec.controls[name].value for name in DEFAULT} == DEFAULT


def test_draft_length_is_what_is_drafted_a_call(lab):
    for gamma in (2, 4):
        move(lab, num_assistant_tokens=gamma, proposer="int4 copy")
        numbers = {number.key: number for number in lab.result.numbers()}
        assert numbers["drafted_per_call"].exact == gamma
        assert numbers["tokens_per_target_call"].exact <= gamma + 1


def test_the_lab_shows_the_tokens_as_they_come(ledger, monkeypatch):
    seen = []
    monkeypatch.setattr(speculative, "typical_prompt", PROMPTS.get)
    monkeypatch.setattr(speculative, "_DEFAULT_PROPOSER", "prompt lookup")
    monkeypatch.setattr(speculative, "trace_html", lambda r: seen.append((len(r.calls), len(r.rounds))) or "")
    lab = speculative_lab(loaded(), device="cpu")
    assert lab.wait(WAIT_S) and lab.error is None, lab.traceback
    assert seen[0][0] > 0 and seen[0][1] == 0 and seen == sorted(seen) and seen[-1][1] == 2


def test_the_csv_holds_every_figure_with_its_label(lab):
    move(lab, num_assistant_tokens=2, proposer="int4 copy")
    rows = list(csv.DictReader(io.StringIO(lab.to_csv())))
    mine = [row for row in rows if row["proposer"] == "int4 copy" and row["num_assistant_tokens"] == "2"]
    by_name = {row["quantity"]: row for row in mine}
    assert float(by_name["speedup"]["value"]) == lab.result.speedup and by_name["speedup"]["label"] == "MEASURED"
    assert by_name["modelled_speedup"]["label"] == by_name["expected_tokens"]["label"] == "MODELLED"
    assert float(by_name["drafted_per_call"]["value"]) == 2.0
    at = {row["num_assistant_tokens"] for row in rows if row["quantity"] == "verify_cost"}
    assert at == {str(n) for n in range(1, 9)}


def test_the_guess_is_answered_by_a_short_a_middling_and_a_long_draft():
    results = [by_hand(2, 1.2), by_hand(4, 1.5), by_hand(4, 1.9, temperature=1.0)]
    assert fastest_length(results) is None
    answer = fastest_length([*results, by_hand(8, 0.8), by_hand(5, 1.3, prompt="copy_heavy")])
    best = max(range(9), key=lambda n: results[0].model(n))
    assert answer.startswith("4 (1.2x at 2, 1.5x at 4, 0.8x at 8). The time model says ")
    assert f"says {best}: {results[0].model(best):.3g}x." in answer
    slow = [by_hand(n, 0.5) for n in (1, 3, 6)]
    assert fastest_length(slow).startswith("none: plain decoding is fastest (")


def test_a_failure_is_shown_and_the_next_move_works(lab, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of <memory>")

    with monkeypatch.context() as patch:
        patch.setattr(_speculative_steps, "generate", fail)
        lab.spec.knobs["num_assistant_tokens"].value = 5
        assert lab.wait(WAIT_S)
    assert "out of &lt;memory&gt;" in lab.status.text and isinstance(lab.error, RuntimeError)
    move(lab, num_assistant_tokens=2)
    assert lab.result.params.num_assistant_tokens == 2 and "labkit-error" not in lab.status.text


def test_a_proposer_that_cannot_be_had_is_one_line_and_another_works(ledger, monkeypatch, tmp_path):
    monkeypatch.setattr(speculative, "typical_prompt", PROMPTS.get)
    lab = speculative_lab(loaded(), device="cpu", head=tmp_path / "none.safetensors")
    assert lab.wait(WAIT_S)
    assert "proposer: got &#x27;EAGLE head&#x27;, which cannot draft here" in lab.status.text
    move(lab, proposer="prompt lookup")
    assert lab.result.speedup > 0 and lab.trace.value.count("labkit-call") > 1


def test_the_controls_offer_what_the_parameters_take(lab):
    assert lab.spec.knobs["num_assistant_tokens"].options == tuple(range(9))
    assert [value for _, value in lab.spec.knobs["temperature"].options][::6] == [0.0, 1.5]
    assert tuple(value for _, value in lab.spec.knobs["proposer"].options) == PROPOSERS
    assert lab.spec.switches["weights"].options == ("int4", "float32")
    assert list(lab.children).index(lab.trace) == list(lab.children).index(lab.numbers) - 1


@pytest.mark.parametrize(
    ("arguments", "names"), [({"device": "tpu"}, "device: got 'tpu'"), ({"model": 3}, "model: got 3; takes a model's")]
)
def test_bad_arguments_are_named(arguments, names):
    with pytest.raises(ValueError, match="^" + re.escape(names)):
        speculative_lab(**arguments)
