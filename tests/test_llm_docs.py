"""docs/llm.md and docs/inside-a-token.md say what was measured, and what is there."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from billfish.cli import parser

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "llm.md").read_text()


def test_the_figures_are_the_recorded_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for passage in importlib.import_module("llm_tables").PASSAGES:
        text = (ROOT / passage.page).read_text()
        assert passage.rewritten(text) == text, "python benchmarks/llm_tables.py writes it anew"


def test_every_format_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    cases = importlib.import_module("llm_formats").FORMATS
    records = json.loads((ROOT / "benchmarks" / "results" / "llm_formats.json").read_text())["records"]
    measured = {(record["format"], record["method"]) for record in records}
    assert measured == {(format, method) for format, _ in cases for method in ("rtn", "mse")}
    assert len(records) == 2 * len(cases)


@pytest.mark.parametrize("line", re.findall(r"^    billfish ((?:run|eval).*)$", PAGE, re.MULTILINE))
def test_every_command_line_is_one_that_we_have(line):
    words = re.sub(r'"[^"]*"', "TEXT", line.split("#")[0]).split()
    parser().parse_args(words)


def test_the_files_of_the_table_are_there():
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.split("## How it is built")[1], re.MULTILINE)
    files = [name for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    assert len(files) > 5
    for name in files:
        assert (ROOT / "billfish" / "llm" / name).exists() or (ROOT / "billfish" / name).exists(), name
