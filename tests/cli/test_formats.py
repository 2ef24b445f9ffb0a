"""`billfish formats`: the table is the library's, and fits a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import billfish as bf
from billfish.cli.formats import print_formats
from billfish.cli.main import main
from billfish.core.format import aliases_of
from billfish.core.tables import print_table

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_formats_lists_every_format(capsys):
    assert main(["formats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["format", *bf.FORMATS]
    assert lines[1 + list(bf.FORMATS).index("q4_0")].split()[:4] == ["q4_0", "4.5", "32", "u4b8"]


def test_formats_lists_the_other_names(capsys):
    main(["formats"])
    for line in capsys.readouterr().out.splitlines()[1:]:
        assert all(name in line for name in aliases_of(bf.get_format(line.split()[0])))


ROWS = [["name", "of", "first", "second", "third"], ["a", "b", "1" * 10, "2" * 20, "3" * 30], ["c", "d", "1", "2", "3"]]


def test_a_table_is_whole_in_a_pipe_and_folded_in_a_terminal(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    pipe = io.StringIO()
    print_table(ROWS, pipe, left=2, keys=2)
    assert pipe.getvalue().splitlines() == [
        "name  of       first                second                           third",
        f"a     b   {'1' * 10}  {'2' * 20}  {'3' * 30}",
        "c     d            1                     2                               3",
    ]
    for width in (200, 74, 73, 42, 41, 20, 5):
        monkeypatch.setenv("COLUMNS", str(width))
        terminal = Terminal()
        print_table(ROWS, terminal, left=2, keys=2)
        parts = [part.splitlines() for part in terminal.getvalue().split("\n\n")]
        assert all(len(part) == 3 and part[1].startswith("a     b ") for part in parts)
        assert " ".join(part[1][10:].strip() for part in parts).split() == ROWS[1][2:]
        assert len(parts) == (1 if width >= 74 else 2 if width >= 42 else 3)
        if width >= 42:  # enough for the widest column beside the keys
            assert max(map(len, terminal.getvalue().splitlines())) <= width


def test_the_table_of_formats_fits_eighty_columns(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    print_formats(terminal)
    assert max(map(len, terminal.getvalue().splitlines())) <= 80
    assert terminal.getvalue().split().count("q4_0") == terminal.getvalue().split().count("format")
