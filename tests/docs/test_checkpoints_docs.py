"""docs/checkpoints.md does what it says."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
from checkpoint_folders import write_folder

import billfish as bf
from billfish.cli.main import main, parser_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_of_the_page_run(tmp_path, monkeypatch, example):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", "plain")
    if "bf.load(" in example and "model.gguf" in example:
        bf.convert("model", "model.gguf", "gguf")
    exec(example, {})


def test_the_page_shows_what_the_commands_print(tmp_path, monkeypatch, capsys):
    """The model is a small one of random numbers, so that anybody can have it."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", "plain")
    shown = re.findall(r"^    \$ billfish (.*)\n((?:    .*\n)+)", PAGE, re.MULTILINE)
    assert [line.split()[0] for line, _ in shown] == ["quantize", "verify"]
    for line, text in shown:
        assert main(shlex.split(line)) == line.startswith("verify")  # which finds differences
        printed = capsys.readouterr().out
        if line.startswith("verify"):  # of which the page has the end
            printed = printed[printed.index("\n\n") + 2 :]
        assert textwrap.indent(printed, "    ") == text


def test_every_command_line_is_one_that_we_have():
    for line in re.findall(r"^    billfish ((?:inspect|quantize|convert|verify) .*)$", PAGE, re.MULTILINE):
        words = [re.sub(r"\|.*", "", word.strip("[]'")) for word in line.split("#")[0].split()]
        parser_of(words[0]).parse_args(words[1:])
