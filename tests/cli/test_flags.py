"""Every flag of every command has an effect: the command reads it. A flag that nothing reads does nothing."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_folders import write_folder
from llm_models import Small, write_model

from billfish.cli.main import COMMANDS, module_of, parser_of

# Words for each command. All flags that are read by some of the lines of a command are read by it.
LINES = {
    "run": ["MODEL -n 1"],
    "serve": ["MODEL --port 0"],
    "eval": ["MODEL --text TEXT --tokens 20 --window 10"],
    "inspect": ["FOLDER"],
    "calibrate": ["FLOATS --text TEXT -o stats.safetensors --tokens 20 --window 10"],
    "quantize": ["FOLDER out --format q4_0", "FLOATS out2 --bits 8.5 --formats q8_0 --plan plan --calibrate TEXT"],
    "rotate": ["FLOATS rotated.gguf"],
    "tune": ["MODEL tuned.gguf --against FLOATS --text TEXT --tokens 20 --window 10"],
    "convert": ["FOLDER out3 --to plain"],
    "verify": ["FOLDER FOLDER"],
    "formats": [""],
    "explain": ["fp4 3"],
    "info": [""],
    "doctor": ["MODEL --backend cpu --report report.json"],
}


class Recorder(argparse.Namespace):
    """Arguments that know which of them were read."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(**vars(arguments))
        object.__setattr__(self, "_read", set())

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            object.__getattribute__(self, "_read").add(name)
        return super().__getattribute__(name)


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions if action.dest != "help"}


def unread(parser: argparse.ArgumentParser, run: Callable[[Any], object], lines: list[list[str]]) -> set[str]:
    """The flags that a command never looks at."""
    left = flags_of(parser)
    for words in lines:
        arguments = Recorder(parser.parse_args(words))
        run(arguments)
        left -= object.__getattribute__(arguments, "_read")
    return left


@pytest.fixture
def files(tmp_path, monkeypatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab"))
    monkeypatch.setenv("BILLFISH_DEVICE", "cpu")
    write_model(tmp_path / "small.gguf", Small())
    write_model(tmp_path / "floats.gguf", Small(quantization="F32"))
    write_folder(tmp_path / "folder", "plain")
    (tmp_path / "text").write_text("abc " * 60)
    return {"MODEL": "small.gguf", "FLOATS": "floats.gguf", "FOLDER": "folder", "TEXT": "text"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_read(name, files, monkeypatch, capsys):
    if name == "serve":
        pytest.importorskip("starlette", reason="needs billfish[serve]")
        monkeypatch.setattr("billfish.serving.http.server.Server.run", lambda self, sockets: self._announce())
    lines = [[files.get(word, word) for word in line.split()] for line in LINES[name]]
    assert unread(parser_of(name), module_of(name).run, lines) == set()


def test_a_flag_that_nothing_reads_is_found():
    parser = argparse.ArgumentParser()
    parser.add_argument("--used")
    parser.add_argument("--cache-type")
    assert unread(parser, lambda arguments: arguments.used, [[]]) == {"cache_type"}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_flag_ends_with_its_default(name):
    for action in parser_of(name)._actions:
        about = action.help or ""
        assert not about.endswith("."), (name, action.dest)
        if action.dest != "help" and (action.option_strings or action.nargs in ("?", "*")):
            ending = re.search(r"\((?:default: (.+)|required.*)\)$", about)
            assert ending, (name, action.dest, about)
            if isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
                assert ending[1] == f"{action.default:g}", (name, action.dest, about)


def test_files_of_commands_have_the_shape_of_a_command():
    """cli/ is one file a command; what several share has a name that is no command."""
    shared = {"__init__", "main", "metal_checks", "model_arguments", "parser", "pictures", "start"}
    folder = Path(module_of("run").__file__).parent
    assert {path.stem for path in folder.glob("*.py")} - shared == set(COMMANDS)
