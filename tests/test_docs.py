"""The README does what it says. docs/check, which `make lint` runs, compares pages with records and files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from billfish.cli import main

ROOT = Path(__file__).parent.parent


def test_the_example_of_the_readme_runs(capsys):
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
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
    readme = (ROOT / "README.md").read_text()
    shown = [line[4:].rstrip() for line in readme.splitlines() if re.match(r"      \w+ .*(0x|minus|bias|\^)", line)]
    assert len(shown) == 9
    assert set(shown) <= printed
