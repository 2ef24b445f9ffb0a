"""docs/checkpoints.md and the README's lines on checkpoints do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import checkpoint_samples as samples

from billfish.cli import parser

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_example_of_the_readme_runs(tmp_path, capsys):
    samples.gptq(tmp_path)
    (example,) = (e for e in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "bf.load(folder)" in e)
    exec(example, {"folder": tmp_path})
    assert "layout='gptq', format=<format u4>" in capsys.readouterr().out


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    samples.gguf_file(tmp_path / "model.gguf", ("Q4_0",))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(example.replace("blk.0.attn_q.weight", "blk.0.Q4_0.weight"), {})


def test_every_command_line_is_one_that_we_have():
    for text in (PAGE, README):
        for line in re.findall(r"^    billfish ((?:inspect|quantize|convert|verify) .*)$", text, re.MULTILINE):
            words = [re.sub(r"\|.*", "", word.strip("[]'")) for word in line.split("#")[0].split()]
            parser().parse_args(words)
