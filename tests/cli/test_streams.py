"""The command line among odd streams and bytes: closed, full or broken outputs, names and texts that are no UTF-8."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoint_folders import write_folder
from llm_models import Small, write_model

import billfish as bf
from billfish.cli import run
from billfish.cli.main import main

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="a shell, and names that are bytes")
ODD = os.fsdecode(b"\xff")  # a lone surrogate


def billfish(redirection: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command with streams as a shell redirects them."""
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-W", "error", "-m", "billfish", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(shell, capture_output=True, text=True, env=environment)


@POSIX
@pytest.mark.parametrize("words", [["formats"], ["info"], ["explain", "fp4", "3"], [], ["--help"], ["--version"]])
def test_a_closed_output_is_no_error(words):
    done = billfish(">&-", *words)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.promise("inputs", "closed, full and broken output streams give no traceback")
@POSIX
def test_a_closed_output_does_not_keep_a_command_from_its_work(tmp_path):
    write_folder(tmp_path / "in", "plain")
    for i, closed in enumerate((">&-", "2>&-", "<&- >&- 2>&-")):
        assert (
            billfish(closed, "quantize", str(tmp_path / "in"), str(tmp_path / f"out{i}"), "--format", "q4_0").returncode
            == 0
        )
        assert bf.load(tmp_path / f"out{i}").layouts >= {"billfish"}
    files = [sorted((path.name, path.read_bytes()) for path in (tmp_path / f"out{i}").iterdir()) for i in range(3)]
    assert files[0] == files[1] == files[2]


@POSIX
def test_errors_are_not_printed_to_the_output_where_theirs_is_closed():
    done = billfish("2>&-", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.promise("inputs", "closed, full and broken output streams give no traceback")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [["formats"], ["--help"], ["--version"], []])
def test_a_full_disk_behind_the_output_is_told(words):
    done = billfish("> /dev/full", *words)
    assert done.stderr == "billfish: standard output: No space left on device\n"
    assert done.returncode == 2


@pytest.mark.promise("inputs", "closed, full and broken output streams give no traceback")
@POSIX
@pytest.mark.parametrize("redirection", ["| true", "2>&1 | true", "2>&1 >/dev/null | true"])
@pytest.mark.parametrize("words", [["formats"], ["nonsense"]])
def test_a_reader_that_goes_away_is_told_nothing(redirection, words):
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "billfish", *words],
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


# ---- what is no UTF-8 ---------------------------------------------------------------------------------------------


@pytest.mark.promise("inputs", "arguments and paths on the command line may be any bytes")
@POSIX
def test_paths_that_are_no_text(tmp_path, capsys):
    write_folder(tmp_path / f"in{ODD}", "plain")
    source, folder, file = (str(tmp_path / name) for name in (f"in{ODD}", f"out{ODD}", f"out{ODD}.gguf"))
    assert main(["inspect", source]) == 0
    assert main(["quantize", source, folder, "--format", "q4_0"]) == 0
    assert main(["convert", source, file, "--to", "gguf"]) == 0
    assert main(["verify", source, file]) == 0
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(path) for path in (source, folder, file))
    assert "\\udcff" in capsys.readouterr().out
    assert bf.load(file).metadata["general.name"] == "in?"
    assert main(["inspect", str(tmp_path / f"none{ODD}")]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.promise("inputs", "arguments and paths on the command line may be any bytes")
@pytest.mark.parametrize(
    "line",
    [
        "?",
        "formats ?",
        "explain ? 1",
        "explain fp4 ?",
        "run ?",
        "run -p ?",
        "run -p a --system ?",
        "run -p a --activations ?",
        "eval --text ?",
        "quantize in out --format ?",
        "quantize in out --format q4_0 --keep ?=q8_0",
        "convert in out --to ?",
        "verify ? ?",
    ],
)
def test_words_that_are_no_text_are_told(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "in", "plain")
    try:
        status = main(line.replace("?", ODD).split())
    except SystemExit as exit:  # argparse
        status = exit.code
    captured = capsys.readouterr()
    assert status == 2
    assert "billfish" in captured.err
    assert captured.out == ""
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.promise("inputs", "invalid text, token ids and KV caches of other models are refused")
def test_a_prompt_that_is_no_text(tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "small.gguf", Small())
    words = ["run", str(tmp_path / "small.gguf"), "-n", "1"]
    for errors in ("strict", "surrogateescape"):  # which of them Python takes depends on the locale
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", errors))
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "standard input" in error
        assert "'utf-8' codec can't" in error
    assert main([*words, "-p", f"a{ODD}"]) == 2
    error = capsys.readouterr().err
    assert "prompt" in error
    assert "'utf-8' codec can't" in error


def test_what_is_typed_and_no_text_is_asked_for_again(tmp_path, monkeypatch, capsys):
    write_model(tmp_path / "small.gguf", Small())
    typed = iter([f"a{ODD}", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "ab", EOFError()])

    def answer(prompt: str) -> str:
        said = next(typed)
        if isinstance(said, Exception):
            raise said
        return said

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", answer)
    assert main(["run", str(tmp_path / "small.gguf"), "-n", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("billfish: ") == 2
    assert "answer 1 token" in captured.err


def test_a_configuration_with_lone_surrogates(tmp_path, capsys):
    write_folder(tmp_path / "in", "plain")
    file = tmp_path / "in" / "config.json"
    config = json.loads(file.read_text()) | {"remark": "\ud800"}
    file.write_text(json.dumps(config))
    bf.convert(tmp_path / "in", tmp_path / "out", "billfish")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["remark"] == "\ud800"
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    file.write_text(json.dumps(config | {"model_type": "\ud800"}))
    with pytest.raises(bf.CheckpointError, match=r"GGUF cannot hold .*general\.architecture"):
        bf.convert(tmp_path / "in", tmp_path / "raw.gguf", "gguf", raw_names=True)
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "out.gguf"]


def test_output_without_characters(monkeypatch):
    """A terminal that knows ASCII alone."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    monkeypatch.setattr(run, "run", lambda arguments: print("é 🎣"))
    assert main(["run"]) == 0
    assert out.getvalue() == b"\\xe9 \\U0001f3a3\n"
