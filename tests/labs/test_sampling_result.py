import dataclasses
import re

import pytest

from labkit.labs._sampling_result import SamplingParams
from labkit.labs._sampling_texts import texts_html
from tests.labs.sampling_fixtures import by_hand, params


def test_the_numbers_by_hand():
    result = by_hand(alpha=0.6, expected=0.7)
    shown = {number.key: number for number in result.numbers()}
    assert (shown["kept"].text, shown["kept"].exact, shown["kept"].note) == ("2", 2, "of 1,000")
    assert shown["entropy_bits"].text == "0.81 bits" and "2.50" in shown["entropy_bits"].note
    assert shown["mass_cut"].exact == pytest.approx(0.2) and "top_k 5.0%, then top_p 15.0%" in shown["mass_cut"].note
    # Six tokens, of which 7 stands in each text.
    assert shown["distinct_share"].exact == 4 / 6 and shown["likeliest_share"].exact == 3 / 6
    assert shown["different_texts"].text == "3 of 3" and "first 1 token" in shown["different_texts"].note
    assert shown["acceptance_rate"].exact == 0.6 and "kept 18 of 30" in shown["acceptance_rate"].note
    assert shown["expected_acceptance"].exact == pytest.approx(0.7) and "MODELLED" in shown["expected_acceptance"].note
    assert shown["tokens_per_target_call"].exact == 13 / 5
    assert all("MEASURED" in number.group for number in shown.values())


def test_texts_that_are_alike_tell_as_much_as_one():
    result = by_hand(alpha=0.6)
    same = dataclasses.replace(result, texts=(result.texts[0],) * 3)
    assert same.alpha_error == pytest.approx(3**0.5 * result.alpha_error) and same.different_texts == 1
    assert same.alike == 2 and result.alike == 1


def test_the_text_form_tells_tokens_and_texts():
    lines = by_hand(0.7, top_p=0.9).text().splitlines()
    assert lines[0] == (
        "sampling_lab: temperature 0.7, top_k off, top_p 0.9; float32 weights, cpu, float32, 2 CPU threads"
    )
    assert any(re.fullmatch(r"  ·the +50\.0% +75\.0%", line) for line in lines)
    assert any(re.fullmatch(r"  ↵ +10\.0% +cut by top_p", line) for line in lines)
    assert "Seed 1: ·<b>x1↵" in lines and "Prompt, 8 tokens: Why <b>?" in lines


def test_every_row_and_line_has_its_setting():
    result = by_hand(0.7, top_k=5, top_p=0.9)
    lines = {m.name.removeprefix("sampling_lab."): m for m in result.measurements()}
    assert len(lines) == 9 and lines["expected_acceptance"].label == "MODELLED"
    assert {m.label for name, m in lines.items() if name != "expected_acceptance"} == {"MEASURED"}
    assert lines["kept"].params == dataclasses.asdict(result.params)
    rows = result.rows()
    assert all(row["temperature"] == 0.7 and row["top_k"] == 5 and row["label"] for row in rows)
    drawn = {row["text"]: row["value"] for row in rows if row["quantity"] == "probability"}
    assert drawn == {" the": 0.75, "<i>": 0.25, "\n": 0.0}
    unfinished = dataclasses.replace(result, texts=())
    assert {m.name for m in unfinished.measurements()} == {
        "sampling_lab.kept",
        "sampling_lab.entropy",
        "sampling_lab.mass_cut",
    }


def test_every_text_is_escaped_and_the_unlikely_marked():
    page = texts_html(by_hand())
    assert "<b>?" not in page and "Why &lt;b&gt;?" in page and "<i>" not in page
    assert page.count("<span> &lt;b&gt;</span>") == 3
    for seed in range(3):
        assert f'<span class="labkit-unlikely">x{seed}<span class="labkit-blank">↵</span><br></span>' in page
    assert page.count('class="labkit-text"') == 3 and "seed 2: 2 tokens" in page
    begun = texts_html(dataclasses.replace(by_hand(), texts=()))
    assert begun.count('class="labkit-text"') == 3 and "<b>seed 2</b>" in begun
    style = re.search(r"\.labkit-unlikely \{([^}]*)\}", page)[1]
    assert "border-bottom" in style and not re.search(r"(^|[; ])color:", style), "a mark beside its tint"


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"temperature": 2.5}, "temperature: got 2.5; takes"),
        ({"temperature": 1.0, "top_k": 101}, "top_k: got 101; takes"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: got 0.0; takes"),
        ({"temperature": 1.0, "proposer": "oracle"}, "proposer: got 'oracle'"),
        ({"temperature": 1.0, "seed": -1}, "seed: got -1; takes"),
    ],
)
def test_wrong_parameters_are_named(wrong, names):
    with pytest.raises(ValueError, match="^" + re.escape(names)):
        SamplingParams(**wrong)


def test_one_curve_is_of_settings_that_differ_in_temperature_alone():
    base = params(1.0, 5, 0.9)
    assert base.same_but_temperature == dataclasses.replace(base, temperature=0.2).same_but_temperature
    for other in ({"top_k": 6}, {"top_p": 0.8}, {"prompt": 1}, {"seed": 1}, {"weights": "int4"}):
        assert base.same_but_temperature != dataclasses.replace(base, **other).same_but_temperature
