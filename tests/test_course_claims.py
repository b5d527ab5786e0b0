"""The course's claims: a chapter's table leaves its figures in the ledger, and the course's table reads them there."""

import os
import re
import stat
import time
from dataclasses import replace

import pytest

from labkit.claims import NOT_MEASURED, claims_table, load_claims
from labkit.course_claims import VERDICTS, CourseClaims, course_claims
from labkit.measure import Label, Ledger, Measurement, device_name

MEASURED = Measurement("decode", 0.6, "ratio", p10=0.5, p90=0.7, device="a CPU", params={"n": 3}, time=1e9)
RECORDED = replace(MEASURED, value=0.71, label=Label.RECORDED, device="an H200")
SPEED = "decode-speed-is-bandwidth"


def _row(claims: CourseClaims, claim_id: str):
    return next(row for row in claims.rows if row.claim.id == claim_id)


def test_a_chapters_table_leaves_each_figure_in_the_ledger_once_with_its_label():
    claims_table(1, {SPEED: {"here": MEASURED, "H200": RECORDED}, "memory-70b-fp16": 141.1e9})
    lines = {(m.params["claim"], m.params["condition"]): m for m in Ledger().read()}
    assert len(lines) == len(Ledger().read()) == 3
    here, there, modelled = lines[SPEED, "here"], lines[SPEED, "H200"], lines["memory-70b-fp16", ""]
    assert (here.value, here.label, here.device, here.p10) == (0.6, Label.MEASURED, "a CPU", 0.5)
    assert here.params["n"] == 3 and here.params["measurement"] == "decode" and here.time == 1e9
    assert (there.value, there.label) == (0.71, Label.RECORDED)
    assert (modelled.value, modelled.label, modelled.unit) == (141.1e9, Label.MODELLED, "bytes")
    claims_table(1, {"memory-70b-fp16": 141.1e9})
    assert len(Ledger().read()) == 4


def test_the_course_takes_the_newest_figures_of_each_claim_and_no_older_condition():
    claims_table(1, {SPEED: {"here": MEASURED, "H200": RECORDED}, "memory-70b-fp16": 99e9})
    assert _row(course_claims(), "memory-70b-fp16").verdict == "does not hold"
    claims_table("01", {SPEED: {"at night": replace(MEASURED, value=1.0)}, "memory-70b-fp16": 141.1e9})
    claims_table(3, {"gqa-8-of-32-saves-75": 0.75})
    table = course_claims()
    assert list(_row(table, SPEED).figures) == ["at night"]
    assert _row(table, SPEED).figures["at night"].value == 1.0
    assert _row(table, "memory-70b-fp16").verdict == _row(table, "gqa-8-of-32-saves-75").verdict == "holds"
    claims_table(1, {})  # a table without figures takes none away
    assert _row(course_claims(), SPEED).figures


def test_verdicts_are_those_of_the_chapters_table():
    figures = {
        "flops-per-token-70b": 1.4e11,
        "kv-share-32k": {"batch 1": 0.5, "batch 2": 0.7},
        "memory-70b-fp16": 141e9,
        SPEED: MEASURED,
    }
    shown = {row.claim.id: row.verdict for row in claims_table(1, figures).rows}
    rows = course_claims().rows
    assert [row.claim for row in rows] == load_claims()
    assert {row.claim.id: row.verdict for row in rows if row.claim.chapter == 1} == shown
    assert {row.verdict for row in rows if row.claim.chapter > 1} == {NOT_MEASURED}


def test_counts_add_up_and_name_every_verdict():
    claims_table(1, {"memory-70b-fp16": 141e9, "memory-405b-fp16": 1e9, "kv-share-32k": {"a": 0.5, "b": 0.7}})
    table = course_claims()
    counts = table.counts()
    assert list(counts) == list(VERDICTS) and sum(counts.values()) == len(load_claims())
    assert [counts[name] for name in VERDICTS[:3]] == [1, 1, 1]
    text = f"{len(load_claims())} claims: holds 1, does not hold 1, holds only when 1, "
    assert text + f"not measured here {len(load_claims()) - 3}." in table.summary()
    assert "no figures yet of chapter 02, 03, 04, 05, 06." in table.summary() and table.open_chapters() == [
        2,
        3,
        4,
        5,
        6,
    ]


def test_the_summary_names_what_was_measured_on_and_when():
    assert "Measured" not in course_claims().summary()
    claims_table(1, {SPEED: {"a": MEASURED, "b": replace(MEASURED, device="", time=0.0), "c": RECORDED}})
    summary = course_claims().summary()
    assert "Measured on a CPU, a device not named, an H200, 2001-09-0" in summary
    claims_table(1, {SPEED: {"a": MEASURED, "b": replace(MEASURED, time=1.5e9)}})
    assert re.search(r"2001-09-\d\d to 2017-07-\d\d\.$", course_claims().summary())
    claims_table(1, {SPEED: replace(MEASURED, time=0.0)})
    assert course_claims().summary().endswith("a CPU, on a day not named.")


def test_the_short_form_has_every_claim_in_110_columns():
    conditions = {f"a condition of some length, the {n}th of many": 0.3 + n / 20 for n in range(12)}
    claims_table(1, {"kv-share-32k": conditions, SPEED: {"H200": RECORDED, "here": MEASURED}})
    text = str(course_claims())
    assert repr(course_claims()) == text
    assert max(map(len, text.splitlines())) <= 110
    first_column = " ".join(line[:54].strip() for line in text.splitlines())
    for claim in load_claims():
        assert claim.claim in first_column and f"\nChapter {claim.chapter:02d}\n" in text
    words = " ".join(text.split())
    assert "30% to 85% MODELLED" in text and "0.6x to 0.71x RECORDED" in text
    assert "only when: a condition of some length, the 6th of many;" in words and "the 5th of many" not in words
    assert text.count("chapter 05 measures it") == len(load_claims(5))
    assert text.count("chapter 01 ran, and left it open") == len(load_claims(1)) - 2
    assert "chapter 01 measures it" not in text and text.endswith("Measured on a CPU, an H200, 2001-09-09.")


def test_html_shows_literature_and_every_figure_escaped():
    claims_table(1, {"kv-share-32k": {"<b>bold</b>": 0.5, "batch 2": 0.7}})
    claims_table(1, {SPEED: replace(MEASURED, device="<b>a CPU</b>")})
    html = course_claims()._repr_html_()
    assert html.count("<table>") == 6 and html.count("<tr>") == 6 + len(load_claims())
    assert "<b>" not in html and "&lt;b&gt;bold&lt;/b&gt;: 50% MODELLED" in html and "batch 2: 70% MODELLED" in html
    assert "Measured on &lt;b&gt;a CPU&lt;/b&gt;" in html
    assert html.count("PUBLISHED: ") == len(load_claims()) and "<h4>Chapter 06</h4>" in html


def test_an_unwritable_ledger_leaves_a_chapters_table_as_it_is(monkeypatch, tmp_path):
    wanted = str(claims_table(1, {SPEED: MEASURED, "memory-70b-fp16": 141e9}))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, and no folder")
    for path in (tmp_path, blocked / "ledger.jsonl", "/proc/ledger.jsonl"):
        monkeypatch.setenv("LABKIT_LEDGER", str(path))
        assert str(claims_table(1, {SPEED: MEASURED, "memory-70b-fp16": 141e9})) == wanted
    if os.geteuid() != 0:
        closed = tmp_path / "closed.jsonl"
        closed.write_text("")
        closed.chmod(stat.S_IRUSR)
        monkeypatch.setenv("LABKIT_LEDGER", str(closed))
        assert str(claims_table(1, {SPEED: MEASURED, "memory-70b-fp16": 141e9})) == wanted
        assert course_claims().counts()[NOT_MEASURED] == len(load_claims())


def test_what_others_wrote_to_the_ledger_counts_for_nothing():
    ledger = Ledger()
    params = {"claim": SPEED, "condition": "", "conditions": [""]}
    for changes in (
        {"params": {}},
        {"params": params | {"claim": [SPEED]}},
        {"params": params | {"condition": ["a"]}},
        {"params": params | {"claim": "memory-70b-fp16", "conditions": None}},
        {"params": params | {"claim": "a-claim-of-another-version"}},
        {"params": params, "unit": "bytes"},
    ):
        ledger.append(replace(MEASURED, **changes))
    ledger.path.write_text(ledger.path.read_text() + "torn {\n")
    assert course_claims().counts()[NOT_MEASURED] == len(load_claims())
    ledger.append(replace(MEASURED, params=params))
    assert _row(course_claims(), SPEED).verdict == "does not hold"


def test_another_ledger_can_be_read(tmp_path):
    other = Ledger(tmp_path / "other.jsonl")
    claims_table(1, {SPEED: MEASURED})
    for line in Ledger().read():
        other.append(replace(line, value=0.9))
    assert course_claims(other).rows[7].figures[""].value == 0.9 and course_claims().rows[7].figures[""].value == 0.6
    assert course_claims(Ledger(tmp_path / "none.jsonl")).open_chapters() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="ledger: got 'ledger.jsonl'; takes a Ledger, or None"):
        course_claims("ledger.jsonl")


def test_measured_is_what_ran_in_this_process_and_here():
    now = replace(MEASURED, time=time.time(), device=device_name("cpu"))
    figures = {"now": now, "earlier": replace(now, time=1e9), "elsewhere": replace(now, device="another")}
    claims_table(1, {SPEED: figures})
    row = next(row for row in course_claims().rows if row.claim.id == SPEED)
    assert [figure.label for figure in row.figures.values()] == [Label.MEASURED, Label.RECORDED, Label.RECORDED]


def test_a_line_in_another_unit_hides_none(tmp_path):
    claims_table(1, {SPEED: MEASURED})
    ledger = Ledger()
    wrong = {"claim": SPEED, "condition": "", "conditions": [""]}
    ledger.append(Measurement(f"claim {SPEED}", 7.0, "bytes", params=wrong, time=2e9))
    ledger.append(Measurement(f"claim {SPEED}", 7.0, "ratio", params=wrong | {"conditions": [["a"]]}, time=2e9))
    row = next(row for row in course_claims().rows if row.claim.id == SPEED)
    assert [figure.value for figure in row.figures.values()] == [0.6]
