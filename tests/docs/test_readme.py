"""The README does what it says. tests/docs, which `make lint` runs, compares pages with records and files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from billfish.cli.main import main, parser_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^    billfish (.+)$|`billfish ([a-z].+?)`", README, re.MULTILINE)


@pytest.mark.parametrize("line", sorted({line.split("#")[0].strip() for pair in COMMANDS for line in pair if line}))
def test_every_command_line_of_the_readme_is_one_that_we_have(line):
    command, *words = shlex.split(line.replace("gguf|compressed-tensors|mlx", "gguf"))
    needed = {"eval": ["--text", "FILE"]}  # where a sentence only names the command
    parser_of(command).parse_args(words or needed.get(command, []))


def test_the_extras_of_the_readme_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = README.split("| extra | for | brings |\n")[1].split("\n\n")[0].splitlines()[1:]
    named = {name: row for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert set(named) == set(extras)
    for name, row in named.items():
        inner = [re.fullmatch(r"billfish\[(\w+)\]", each) for each in extras[name]]  # an extra that brings another
        brought = extras[name] + [each for match in inner if match for each in extras[match[1]]]
        for package in filter(None, row.split("|")[3].strip().split(", ")):
            if package not in ("...", "NVRTC", "a compiler"):
                assert any(re.match(rf"{package}\b", each) for each in brought), (name, package)
    for asked in re.findall(r"pip install '\.\[([\w,-]+)\]'", README):
        assert set(asked.split(",")) <= set(extras)


def test_make_builds_with_what_the_package_asks_for():
    tomllib = pytest.importorskip("tomllib")
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    builders = re.search(r"^BUILDERS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert builders is not None
    assert [word for word in shlex.split(builders[1]) if ">=" in word] == asked


def test_the_example_of_the_readme_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(example, names)
    x, w = names["x"], names["w"]
    for y in (names["y"], names["y2"]):
        error = np.linalg.norm(y - x @ w.T) / np.linalg.norm(x @ w.T)
        assert error < 0.12
    assert capsys.readouterr().out.startswith("QuantizedTensor(fp4, [4096, 1024]")


def test_the_walk_in_the_readme_is_what_explain_prints(capsys):
    main(["explain", "fp4", "0b1011", "--scale", "0.3"])
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    shown = [line[4:].rstrip() for line in README.splitlines() if re.match(r"      \w+ .*(0x|minus|bias|\^)", line)]
    assert len(shown) == 9
    assert set(shown) <= printed
