"""The command line as a whole: help, wrong commands, Ctrl-C, and what nobody waits for."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

import billfish as bf
from billfish.cli.main import COMMANDS, GROUPS, main, module_of, parser_of
from billfish.cli.parser import OTHERS


def test_python_dash_m_and_a_reader_that_stops_early():
    command = f"{sys.executable} -m billfish formats | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("format ")
    assert done.stderr == ""


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for title, commands in GROUPS.items():
        below = captured.out.split(f"\n{title}\n")[1].split("\n\n")[0]
        assert re.findall(r"^  (\w+)", below, re.MULTILINE) == list(commands)
    assert max(map(len, captured.out.splitlines())) <= 80
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == captured.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_can_be_parsed_and_is_in_the_help_of_its_command(name, capsys):
    program, command, *words = shlex.split(COMMANDS[name].example)
    assert (program, command) == ("billfish", name)
    parser_of(name).parse_args(words)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: billfish {name} ")
    assert f"example: {COMMANDS[name].example}" in shown


def test_an_unknown_command_gets_the_nearest(capsys):
    assert main(["quantise", "in", "out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("billfish: ")
    for fact in ("'quantise'", "'quantize'?", "billfish help"):
        assert fact in captured.err


@pytest.mark.parametrize("words", [["--"], ["--nothing"], ["-x", "formats"]])
def test_options_without_a_command_are_wrong(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: billfish COMMAND ...")


@pytest.mark.promise("threads", "Ctrl-C shows no traceback; `convert` and `quantize` say how to continue")
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_shows_no_traceback(name, capsys, monkeypatch):
    words = shlex.split(COMMANDS[name].example)[1:]
    monkeypatch.setattr(module_of(name), "run", Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("billfish: stopped")
    assert captured.err.count("\n") == 1
    assert ("same command continues" in captured.err) == COMMANDS[name].resumes


@pytest.mark.promise("inputs", "too little memory for the process is told in a line")
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_too_little_memory_is_told_in_a_line(error, capsys, monkeypatch):
    monkeypatch.setattr(module_of("run"), "run", Mock(side_effect=error))
    assert main(["run", "-p", "hi"]) == 2
    said = capsys.readouterr().err
    assert "memory" in said
    assert said.count("\n") == 1
    monkeypatch.setattr(module_of("run"), "run", Mock(side_effect=RuntimeError("a mistake of ours")))
    with pytest.raises(RuntimeError, match="of ours"):
        main(["run", "-p", "hi"])


def test_help_is_a_command_and_chat_is_run(capsys):
    assert main(["help"]) == 0
    assert capsys.readouterr().out.startswith("usage: billfish COMMAND")
    shown = {}
    for words in (["help", "run"], ["run", "--help"], ["chat", "-h"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        shown[tuple(words)] = capsys.readouterr().out
    assert set(shown.values()) == {shown["help", "run"]}
    assert main(["help", "chat"]) == 0
    assert "billfish help run" in capsys.readouterr().out
    assert main(["help", "nothing"]) == 2


def test_v_is_the_version(capsys):
    for word in ("-v", "--version"):
        with pytest.raises(SystemExit) as caught:
            main([word])
        assert (caught.value.code, capsys.readouterr().out) == (0, f"billfish {bf.__version__}\n")


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        ("run --tempurature 1", ["no option --tempurature", "Did you mean --temperature?"]),
        ("run --temp 1", ["--temp.", "--temperature T"]),  # llama.cpp's, and no abbreviation
        ("run --max 3", ["no option --max"]),
        ("serve m --api key", ["no option --api", "--api-key"]),
        ("run m -ngl 99", ["-ngl", "--device cuda"]),
        ("serve -hf org/name", ["-hf", "hf download ORG/NAME"]),
        ("chat m -cnv", ["-cnv", "in a terminal"]),
        ("serve m --ctx-size=4096", ["--ctx-size", "-c N"]),
        ("run a b c", ["'c'", "too many"]),
        ("quantize a b", ["--format", "--bits"]),
        ("run -n many", ["-n/--max-tokens", "'many'"]),
    ],
)
def test_wrong_words_get_the_usage_of_their_command(line, facts, capsys):
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    command = line.split()[0].replace("chat", "run")
    usage, hint, error = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: billfish {command} ")
    assert f"billfish {command} --help" in hint
    assert [fact for fact in facts if fact not in error] == []


def test_options_of_others_that_are_ours_as_well_get_no_hint():
    ours = {option for name in COMMANDS for option in parser_of(name)._option_string_actions}
    assert ours.isdisjoint(OTHERS)


def test_nobody_waits_for_what_others_need():
    """Importing billfish, or the command line, leaves frameworks, other machines' backends and containers alone."""
    code = "import sys, billfish.cli.main; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    parts = {f"billfish.{part}" for part in ("nn", "llm", "checkpoints", "backends.cuda", "backends.metal")}
    others = {"torch", "mlx", "transformers", "gguf", "safetensors", "tokenizers", "jinja2", "concurrent.futures"}
    assert not (parts | others).intersection(modules)
    assert "numpy" not in modules  # more than half of the time of `billfish --version`


FORMATS_ALONE = """
import importlib, os, sys
import numpy
for name in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(name)
        from billfish.core.format import FORMATS
        os._exit(len(FORMATS) < 20)
    if os.wait()[1]:
        print(name)
"""


def test_whoever_asks_for_formats_finds_all_of_them():
    """Importing billfish imports nothing, so that a module must see to the registry itself."""
    askers = ["core.tensor", "backends.cpu.tensors", "ops.ggml_blocks", "checkpoints", "llm", "quantizing.sensitivity"]
    names = [f"billfish.{name}" for name in (*askers, "nn", "cli.formats", "cli.explain", "cli.info", "cli.doctor")]
    done = subprocess.run([sys.executable, "-c", FORMATS_ALONE, *names], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_names_that_are_imported_when_used_are_there():
    assert set(bf.__all__) <= set(dir(bf))
    for name in bf.__all__:
        assert getattr(bf, name) is not None
    assert bf.load is bf.checkpoints.load
    with pytest.raises(AttributeError, match="module 'billfish' has no attribute 'nothing'"):
        bf.nothing  # noqa: B018


def test_an_error_of_the_system_says_what_failed(capsys, monkeypatch):
    """It was "takes a place with room that can be written to", whatever happened."""
    error = OSError(13, "Permission denied", "some/file")
    monkeypatch.setattr(module_of("inspect"), "run", Mock(side_effect=error))
    assert main(["inspect", "some"]) == 2
    told = capsys.readouterr().err
    assert "some/file" in told
    assert "Permission denied" in told
    assert "room" not in told


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_ctrl_c_while_modules_are_imported_shows_no_traceback(tmp_path):
    """The first import of the command line never ends here."""
    (tmp_path / "argparse.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "billfish", "serve"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, preexec_fn=heed_ctrl_c, **pipes) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (-signal.SIGINT, "")


LOST = """
import signal, sys, time, weakref
import billfish.cli.main
from billfish.cli import start

def run():
    thing = type("Thing", (), {})()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    try:
        del thing
        time.sleep(60)
    except KeyboardInterrupt:
        return 130

billfish.cli.main.main = run
sys.exit(start.main())
"""


@pytest.mark.promise("threads", "Ctrl-C shows no traceback; `convert` and `quantize` say how to continue")
def test_ctrl_c_within_a_callback_is_not_lost():
    """Python would print a traceback and go on."""
    done = subprocess.run([sys.executable, "-c", LOST], preexec_fn=heed_ctrl_c, capture_output=True, timeout=50)
    assert (done.returncode, done.stderr) == (130, b"")


def heed_ctrl_c() -> None:
    """Background jobs of a shell do not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
