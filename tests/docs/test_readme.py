"""The README and docs/install.md do what they say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
MAC = (ROOT / "docs" / "first-hour-on-a-mac.md").read_text()


def test_the_readme_is_one_screen_and_some():
    assert len(README.splitlines()) <= 130


def test_the_extras_of_the_page_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = INSTALL.split("| extra | for | brings |\n")[1].split("\n\n")[0].splitlines()[1:]
    named = {name: row for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert set(named) == set(extras)
    for name, row in named.items():
        inner = [re.fullmatch(r"billfish\[(\w+)\]", each) for each in extras[name]]  # an extra that brings another
        brought = extras[name] + [each for match in inner if match for each in extras[match[1]]]
        for package in filter(None, row.split("|")[3].strip().split(", ")):
            if package not in ("...", "NVRTC", "a compiler"):
                assert any(re.match(rf"{package}\b", each) for each in brought), (name, package)
    for asked in re.findall(r"pip install '\.\[([\w,-]+)\]'", README + INSTALL + MAC):
        assert set(asked.split(",")) <= set(extras)


def test_make_builds_with_what_the_package_asks_for():
    tomllib = pytest.importorskip("tomllib")
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = package["project"]
    lists = dict(re.findall(r"^(BUILDERS|SITE) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name: {word for word in shlex.split(text) if ">=" in word} for name, text in lists.items()}
    assert named["BUILDERS"] == set(package["build-system"]["requires"])
    assert named["SITE"] == {*project["optional-dependencies"]["docs"], *project["dependencies"]}


def test_the_example_of_the_readme_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(example, names)
    x, w, y = names["x"], names["w"], names["y"]
    assert np.linalg.norm(y - x @ w.T) / np.linalg.norm(x @ w.T) < 0.12
    assert capsys.readouterr().out.startswith("QuantizedTensor(q4_0, [4096, 1024]")
