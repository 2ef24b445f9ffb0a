"""`billfish formats` and `billfish explain`: what they print is what the library does."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import billfish as bf
from billfish.cli import info
from billfish.cli.explain import explain, planes_of, print_formats, record, walks
from billfish.cli.main import COMMANDS, main
from billfish.cli.parser import EXAMPLES, GROUPS, parser
from billfish.core.format import aliases_of
from billfish.core.tables import print_table

ROOT = Path(__file__).parents[2]
FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)


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


def test_the_table_in_the_documentation_is_the_table(capsys):
    main(["formats", "--markdown"])
    assert capsys.readouterr().out in (ROOT / "docs" / "formats.md").read_text()


@FORMATS
@pytest.mark.parametrize(("scale", "offset"), [(1.0, None), (0.3, 2.5), (-0.01, -4.0)])
def test_explain_ends_with_the_value_of_the_format(format, scale, offset):
    if scale < 0 and "f16" not in format.scale:
        scale = -scale  # E8M0 and unsigned E4M3 have no sign
    if format.offset == "none":
        offset = None
    for code in range(2**format.element.bits):
        out = io.StringIO()
        result = explain(format, code, scale, offset, out)
        assert out.getvalue().rstrip().endswith(f"= {result:.9g}")
        planes = planes_of(format, code, scale, offset)
        tensor = bf.QuantizedTensor.from_planes(format, planes)
        assert (planes["codes"] == code).all()
        np.testing.assert_array_equal(result, bf.dequantize(tensor)[0, 0])
        held = float(format.group_values(planes).scale[0, 0]) * (2 if format.element.name == "e2m1x2" else 1)
        assert held == pytest.approx(scale, rel=0.5 if "e8m0" in format.scale else 0.07)


@FORMATS
def test_every_walk_ends_with_the_value_of_the_element(format):
    for walk in walks(format.element):
        for code, value in enumerate(format.element.values):
            last = record(walk, code, format.element)[-1]
            assert last.lanes is not None
            if np.isnan(value):
                continue  # the tricks know no NaN
            assert (last.lanes.astype(np.float32) == value).all()
            assert (np.signbit(last.lanes) == np.signbit(value)).all()


def test_every_element_but_a_table_has_a_walk():
    for format in bf.FORMATS.values():
        assert bool(walks(format.element)) == (format.element.name not in ("iq4nl", "e2m1x2", "nf4"))


def test_explain_shows_the_bits_moving(capsys):
    assert main(["explain", "fp4", "0b1011", "--scale", "0.25"]) == 0
    text = capsys.readouterr().out
    for piece in (
        "0xb000b000",
        "& 0x80008000",
        "& 0x70007000",
        ">> 3",
        "0x86008600",
        "* 16384",
        "0xbe00be00",
        "= -0.375",
    ):
        assert piece in text


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def printed(stream):
        print_formats(stream)
        explain(bf.FORMATS["fp4"], 3, 1.0, None, stream)
        return stream.getvalue()

    assert "\x1b[" in printed(Terminal())
    assert "\x1b[" not in printed(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in printed(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b[" not in printed(Terminal())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["explain", "fp4", "16"],
            "billfish: [explain] CODE: got 16; takes 0 to 15 for fp4, such as 5, 0b101 or 0x5\n",
        ),
        (
            ["explain", "fp5", "1"],
            f"billfish: [explain] format: got 'fp5'; takes one of {', '.join(bf.FORMATS)}; did you mean 'fp4'?\n",
        ),
    ],
)
def test_wrong_arguments_get_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp4", "3", "--scale", "1e10"], "--scale: got 1e+10; takes what f16 can hold"),
        (["mxfp4", "3", "--scale", "0"], "--scale: got 0; takes what e8m0 can hold"),
        (["mxfp4_gguf", "3", "--scale", "-1"], "--scale: got -1; takes what e8m0 can hold"),
        (["nvfp4", "3", "--scale", "1000"], "--scale: got 1000; takes what e4m3 * f32 can hold"),
        (["nvfp4_gguf", "3", "--scale", "-2"], "--scale: got -2; takes what ue4m3 * f32 can hold"),
        (["u4", "3", "--offset", "1e9"], "--offset: got 1e+09; takes what float16 can hold"),
        (["fp4", "3", "--offset", "5"], "--offset: got 5; takes none: fp4 has no offset"),
    ],
)
def test_explain_refuses_what_the_format_cannot_hold(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    assert capsys.readouterr().err == f"billfish: [explain] {message}\n"


def test_a_code_that_is_no_number(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explain", "fp4", "five"])
    assert caught.value.code == 2
    assert "invalid integer value: 'five'" in capsys.readouterr().err


def test_python_dash_m_and_a_reader_that_stops_early():
    command = f"{sys.executable} -m billfish formats | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("format ")
    assert done.stderr == ""


# ---- info -----------------------------------------------------------------------------------------------------------


def told(capsys, *options):
    assert main(["info", *options]) == 0
    return capsys.readouterr().out


def test_info_says_what_was_found_and_chosen(capsys):
    facts = json.loads(told(capsys, "--json"))
    assert list(facts["backends"]) == list(bf.BACKENDS)
    assert facts["levels"][-1] == "portable"
    assert facts["backends"]["cpu"]["about"].split()[0] == bf.BACKENDS["cpu"].level
    assert facts["chosen"] == "cpu"
    assert facts["threads"]["used"] >= 1
    assert facts["threads"]["cores"] == os.cpu_count()
    assert facts["memory"]["total"] >= facts["memory"].get("available", 0) > 0
    assert facts["packages"]["numpy"] == np.__version__
    text = told(capsys)
    lines = dict(line.strip().split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)
    assert lines["chosen"] == "cpu, for NumPy arrays"
    for name, answer in facts["backends"].items():
        assert lines[name].split(":")[0] in (["yes", "by name only"] if answer["usable"] else ["no"])
        assert answer["about"] in text
    for name, version in facts["packages"].items():
        assert lines[name].startswith(version or "-")


def test_info_says_why_a_backend_is_not_usable(capsys, monkeypatch):
    class Broken(type(bf.BACKENDS["reference"])):
        def usable(self):
            return False, "it is broken"

    monkeypatch.setitem(bf.BACKENDS._made, "reference", Broken())
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError))
    monkeypatch.setattr(sys, "platform", "linux")
    text = told(capsys)
    assert re.search(r"^  reference +no: it is broken$", text, re.MULTILINE)
    assert re.search(r"^  metal +no: Metal is a part of macOS$", text, re.MULTILINE)
    assert re.search(r"^  tokenizers +-   pip install 'billfish\[llm\]'$", text, re.MULTILINE)
    assert re.search(r"^  torch +-$", text, re.MULTILINE)


def test_info_works_where_the_environment_does_not(capsys, monkeypatch):
    monkeypatch.setenv("BILLFISH_ISA", "abacus")
    monkeypatch.setattr(bf.BACKENDS, "_made", {})
    text = told(capsys)
    assert "environment         BILLFISH_ISA=abacus" in text
    assert re.search(r"^  cpu +no: \[cpu\] BILLFISH_ISA: got 'abacus'; takes one", text, re.MULTILINE)
    monkeypatch.setenv("BILLFISH_ISA", "portable")
    monkeypatch.setattr(bf.BACKENDS, "_made", {})
    assert "yes: portable kernels, as BILLFISH_ISA says" in told(capsys)


@pytest.mark.parametrize(
    ("variable", "used", "allowed", "why"),
    [
        ("3", 3, 8, "OMP_NUM_THREADS"),
        (None, 2, 8, "the CPU quota of this process"),
        (None, 4, 4, "the cores that this process may use"),
        (None, 8, 8, "all cores"),
    ],
)
def test_why_so_many_threads(monkeypatch, variable, used, allowed, why):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(info, "_cpu", SimpleNamespace(threads=lambda: used))
    assert info.threads() == {"used": used, "cores": 8, "allowed_cores": allowed, "why": why}


def test_memory_where_the_system_says_less(tmp_path):
    assert info.memory(tmp_path / "none").keys() == {"total"}
    (tmp_path / "some").write_text("MemTotal: 2048 kB\nMemAvailable: 1024 kB\n")
    assert info.memory(tmp_path / "some") == {"total": 2 << 20, "available": 1 << 20}


def test_info_fits_a_terminal_and_imports_nothing_heavy(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    terminal = Terminal()
    info.print_info(terminal)
    assert max(map(len, terminal.getvalue().splitlines())) <= 60
    code = "import sys; from billfish.cli.main import main; main(['info']); print(*sys.modules, file=sys.stderr)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "gguf", "tokenizers", "matplotlib"}.intersection(ran.stderr.split())


def test_extras_bring_what_info_says():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, extra in info.PACKAGES.items():
        if extra:
            assert any(re.match(rf"{package}\b", each) for each in extras[extra]), package


# ---- the frame ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_parsed_and_is_in_the_help_of_its_command(name, capsys):
    program, *words = shlex.split(EXAMPLES[name])
    assert (program, parser().parse_args(words).command) == ("billfish", name)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: billfish {name} ")
    assert f"example: {EXAMPLES[name]}" in shown


def test_an_unknown_command_gets_the_nearest(capsys):
    assert main(["quantise", "in", "out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("billfish: [billfish] COMMAND: got 'quantise'; takes one of run, serve, eval, ")
    assert captured.err.endswith("; did you mean 'quantize'?\n")


@pytest.mark.parametrize("words", [["--"], ["--nothing"], ["-x", "formats"]])
def test_options_without_a_command_are_wrong(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: billfish COMMAND ...")


@pytest.mark.parametrize("name", EXAMPLES)
def test_ctrl_c_shows_no_traceback(name, capsys, monkeypatch):
    words = shlex.split(EXAMPLES[name])[1:]
    monkeypatch.setitem(COMMANDS, name, Mock(side_effect=KeyboardInterrupt))
    assert main(words) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "billfish: stopped\n")


def test_nobody_waits_for_what_others_need():
    """Importing billfish, or the command line, leaves frameworks, other machines' backends and containers alone."""
    code = "import sys, billfish.cli.main; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    parts = {f"billfish.{part}" for part in ("nn", "llm", "checkpoints", "backends.cuda", "backends.metal", "bench")}
    others = {"torch", "mlx", "transformers", "gguf", "safetensors", "tokenizers", "jinja2", "concurrent.futures"}
    assert not (parts | others).intersection(modules)


def test_names_that_are_imported_when_used_are_there():
    assert set(bf.__all__) <= set(dir(bf))
    for name in bf.__all__:
        assert getattr(bf, name) is not None
    assert bf.load is bf.checkpoints.load
    with pytest.raises(AttributeError, match="module 'billfish' has no attribute 'nothing'"):
        bf.nothing  # noqa: B018
