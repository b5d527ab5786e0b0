"""The README's table of what was measured is what the recorded files say."""

import pytest

from tools import measured_table
from tools.measured_table import BEGIN, END, README, put_into, table


def test_the_readme_holds_the_recorded_figures():
    text = README.read_text(encoding="utf-8")
    assert put_into(text) == text, "python -m tools.measured_table --write brings README.md up to date"


def test_every_row_names_a_machine_and_a_command():
    rows = [line.strip("| ").split(" | ") for line in table().splitlines()[2:]]
    assert len(rows) >= 8
    for row in rows:
        assert len(row) == 4 and "cores" in row[2] and "`" in row[3], row


def test_it_is_put_between_the_marks_and_nowhere_else():
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    made = put_into(text)
    assert made == f"before\n{BEGIN}\n{table()}\n{END}\nafter\n" and put_into(made) == made
    with pytest.raises(ValueError, match="measured: begin"):
        put_into("no marks")


def test_the_command_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measured_table, "README", tmp_path / "README.md")
    measured_table.README.write_text(f"{BEGIN}\n{END}\n")
    assert measured_table.main(["--write"]) == 0
    assert capsys.readouterr().out.strip() == table()
    assert table() in measured_table.README.read_text()
