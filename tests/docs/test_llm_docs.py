"""The command lines of docs/llm.md are ones that we have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from billfish.cli.main import parser_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "llm.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^    billfish ((?:run|eval).*)$", PAGE, re.MULTILINE))
def test_every_command_line_is_one_that_we_have(line):
    command, *words = re.sub(r'"[^"]*"', "TEXT", line.split("#")[0]).split()
    parser_of(command).parse_args(words)
