"""Columns of text: whole in a pipe, fitted to a terminal."""

from __future__ import annotations

import io

import pytest

from billfish.core.tables import shortened, table, terminal_width


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("model.norm.weight", 17, "model.norm.weight"),
        ("model.norm.weight", 16, "model.....weight"),
        ("abcdefghijklmnop", 13, "abcde...lmnop"),
        ("abcdefghijklmnop", 14, "abcde...klmnop"),
        ("abcdefghijklmnop", 3, "abcd...lmnop"),
    ],
)
def test_both_ends_of_a_name_stay(text, width, expected):
    assert shortened(text, width) == expected


def test_the_widest_columns_are_shortened_and_no_others():
    rows = [("name", "format", "MB"), ("a" * 40, "q4_0", "1.0"), ("b" * 10, "not supported: " + "c" * 20, "22.0")]
    assert table(rows)[1] == "a" * 40 + "  " + "q4_0".ljust(35) + "  1.0"
    lines = table(rows, 60)
    assert max(map(len, lines)) == 60
    assert lines[1].endswith("  1.0")
    assert lines[2].startswith("b" * 10 + " ")
    assert table(rows, 1) == table(rows, 30)  # there is a limit
    assert table([]) == []


def test_a_pipe_has_no_width(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "93")
    assert terminal_width(io.StringIO()) is None
    assert terminal_width(Terminal()) == 93
