import csv
import io

import pytest

from labkit.labs._result import duration, si, to_csv
from tests.labs.fake import Params, Result


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5_898_240, "5.90 MB"),
        (11_796_480, "11.8 MB"),
        (538_000_000, "538 MB"),
        (999_999_600, "1.00 GB"),
        (24.5e9, "24.5 GB"),
        (12, "12.0 B"),
        (0, "0 B"),
        (1234, "1.23 kB"),
        (7.5e15, "7,500 TB"),
    ],
)
def test_si(value, expected):
    assert si(value, "B") == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(1.5, "1.50 s"), (0.02445, "24.4 ms"), (0.0000321, "32.1 µs"), (123.4, "123 s"), (3e-8, "0.0300 µs")],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected


def test_csv_has_a_line_a_row_and_the_union_of_columns():
    class Wider(Result):
        def rows(self):
            return [{"size": 3, "extra": 'say "yes", twice'}]

    table = list(csv.DictReader(io.StringIO(to_csv([Result(Params(2), 4), Wider(Params(3), 9)]))))
    assert table == [
        {"size": "2", "area": "4", "extra": ""},
        {"size": "3", "area": "", "extra": 'say "yes", twice'},
    ]


def test_csv_of_nothing_is_no_row():
    assert to_csv([]).strip() == ""
