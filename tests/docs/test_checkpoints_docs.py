"""The README's lines on checkpoints do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import checkpoint_samples as samples

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_of_the_readme_runs(tmp_path, capsys):
    samples.gptq(tmp_path)
    (example,) = (e for e in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "bf.load(folder)" in e)
    exec(example, {"folder": tmp_path})
    assert "layout='gptq', format=<format u4>" in capsys.readouterr().out
