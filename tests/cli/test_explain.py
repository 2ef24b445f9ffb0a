"""`billfish explain`: what it prints is what the library does."""

from __future__ import annotations

import io

import numpy as np
import pytest
from cases import diagonal

import billfish as bf
from billfish.cli.explain import explain, planes_of, record, walks
from billfish.cli.formats import print_formats
from billfish.cli.main import main

FORMATS = pytest.mark.parametrize("format", bf.FORMATS.values(), ids=lambda f: f.name)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("format", "scale", "offset"), diagonal(3, bf.FORMATS.values(), [(1.0, None), (0.3, 2.5), (-0.01, -4.0)])
)
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
    ("arguments", "facts"),
    [
        (["fp4", "16"], ["CODE 16", "fp4", "0 to 15"]),
        (["fp5", "1"], ["format", "'fp5'", "'fp4'?"]),
        (["fp4", "3", "--scale", "1e10"], ["--scale 1e+10", "f16"]),
        (["mxfp4", "3", "--scale", "0"], ["--scale 0", "e8m0"]),
        (["mxfp4_gguf", "3", "--scale", "-1"], ["--scale -1", "e8m0"]),
        (["nvfp4", "3", "--scale", "1000"], ["--scale 1000", "e4m3 * f32"]),
        (["nvfp4_gguf", "3", "--scale", "-2"], ["--scale -2", "ue4m3 * f32"]),
        (["u4", "3", "--offset", "1e9"], ["--offset 1e+09", "float16"]),
        (["fp4", "3", "--offset", "5"], ["--offset 5", "fp4 has no offset"]),
    ],
)
def test_explain_refuses_what_the_format_cannot_hold(capsys, arguments, facts):
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("billfish: ")
    assert captured.err.count("\n") == 1
    assert [fact for fact in facts if fact not in captured.err] == []


def test_a_code_that_is_no_number(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explain", "fp4", "five"])
    assert caught.value.code == 2
    assert "invalid integer value: 'five'" in capsys.readouterr().err
