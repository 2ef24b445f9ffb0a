"""The script of `make docs-commands` is from the pages: each command and option is in the page that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_commands.run import COMMANDS, Command, commands, missing

ROOT = Path(__file__).parents[2]
SCRIPT = commands(COMMANDS.read_text())


def test_each_command_prints_what_its_page_says():
    assert len(SCRIPT) >= 40
    assert all(command.prints for command in SCRIPT)


@pytest.mark.parametrize("command", SCRIPT, ids=lambda command: command.text.splitlines()[0][:60])
def test_the_page_names_the_command(command):
    page = (ROOT / command.page).read_text()
    names = set(re.findall(r"billfish [a-z]+(?= )|bf\.\w+", command.text)) - {"billfish as"}
    options = set(re.findall(r" (--[a-z-]+)", command.text)) if "billfish " in command.text else set()
    lacking = {word for word in names | options if word not in page}
    assert not lacking - {"--version"}, f"{command.page} does not have {lacking}"


@pytest.mark.parametrize(
    ("text", "prints", "lacking"),
    [
        ("echo one; echo two >&2", ("one", "two"), []),
        ("echo one", ("one", "two"), ["'two'"]),
        ("echo one; false", ("one",), ["success, instead of status 1"]),
        ("false | echo one", ("one",), ["success, instead of status 1"]),
        ("cat <<END\none\ntwo\nEND", ("two",), []),
    ],
)
def test_a_command_can_fail(tmp_path, text, prints, lacking):
    assert missing(Command("README.md", text, prints), tmp_path, {"PATH": "/usr/bin:/bin"})[0] == lacking
