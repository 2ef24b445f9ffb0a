"""`billfish quantize`: which word of the command line is what, and the command of the README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from llm_models import Small, write_model

import billfish as bf
from billfish.cli.main import main, parser_of
from billfish.cli.quantize import paths_and_text

README = (Path(__file__).parents[2] / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("IN OUT", ("IN", "OUT", False)),
        ("IN OUT --calibrate", ("IN", "OUT", True)),
        ("IN OUT --calibrate TEXT", ("IN", "OUT", "TEXT")),
        ("--calibrate=TEXT IN OUT", ("IN", "OUT", "TEXT")),
        ("--calibrate TEXT IN OUT", ("IN", "OUT", "TEXT")),
        ("--calibrate IN OUT", ("IN", "OUT", True)),
        ("IN --calibrate OUT", ("IN", "OUT", True)),
        ("IN --calibrate TEXT OUT", ("IN", "OUT", "TEXT")),
    ],
)
def test_calibrate_takes_neither_in_nor_out_for_its_text(line, expected):
    for words in (f"--format q4_0 {line}", f"{line} --format q4_0"):
        assert paths_and_text(parser_of("quantize").parse_args(words.split())) == expected


@pytest.mark.parametrize(("line", "missing"), [("", "IN"), ("IN", "OUT"), ("IN --calibrate", "OUT")])
def test_a_path_that_is_missing_is_told(line, missing, capsys):
    try:
        status = main(["quantize", *line.split(), "--format", "q4_0"])
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    assert missing in capsys.readouterr().err.splitlines()[-1]


def test_an_unknown_mix_is_told_the_mixes(tmp_path, capsys):
    """It was told to use the command that it was in."""
    assert main(["quantize", str(tmp_path), str(tmp_path / "out"), "--format", "Q4_K_XL"]) == 2
    error = capsys.readouterr().err
    assert "'Q4_K_XL'" in error
    assert "Q4_K_M" in error
    assert "quantize_checkpoint" not in error
    with pytest.raises(bf.FormatError, match="Q4_K_M"):
        bf.llm.load(bf.llm.default_model(), quantize="Q4_K_XL")


def test_the_command_of_the_readme_runs_on_a_model_with_a_tied_head(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tied.gguf", Small(quantization="F32", tied=True, hidden=128, heads=4, feed_forward=128))
    bf.convert("tied.gguf", "smol", "plain", dtype="float32")
    lines = re.findall(r"^billfish (quantize smol smol.gguf .*--keep.*?)(?: *#.*)?$", README, re.MULTILINE)
    assert lines
    for line in lines:
        assert main(shlex.split(line)) == 0
    assert bf.open_checkpoint("smol.gguf")["token_embd.weight"].format.name == "q8_0"
