"""docs/calibration.md: its examples run, its commands are there, and its sizes are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from llm_models import Small, write_model

from billfish.cli.main import parser_of
from billfish.llm.cpu import inputs_of
from billfish.llm.model import default_model
from billfish.llm.model_files import open_source
from billfish.models import describe
from billfish.quantizing import sensitivity
from billfish.quantizing.bit_plan import BitPlan
from billfish.quantizing.calibrate_checkpoint import TOKENS, WINDOW, default_text

PAGE = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_run(tmp_path, monkeypatch, example):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BILLFISH_DEVICE", "cpu")
    write_model(Path("model.gguf"), Small(quantization="F32"))
    Path("text.txt").write_text("ab abba, what is this? " * 20)
    exec(example, {})


def test_the_commands_are_there():
    lines = re.findall(r"^    (billfish .*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    assert len(lines) == 9
    for line in lines:
        command, *words = shlex.split(line)[1:]
        parser_of(command).parse_args(words)


def test_the_plan_is_one(tmp_path):
    [sample] = re.findall(r"```\n(# .*?)```", PAGE, re.DOTALL)
    (tmp_path / "plan").write_text(sample)
    plan = BitPlan.load(tmp_path / "plan")
    assert plan.format == "iq4_nl"
    assert {*plan.keep.values()} == {"q5_0", "q8_0"}
    assert re.search(next(iter(plan.keep)), "blk.29.ffn_down.weight")


def test_the_numbers_of_a_plan_are_those_of_the_code():
    assert f"passes of {sensitivity.TOKENS} tokens in windows of {sensitivity.WINDOW}" in PAGE
    *first, last = (f"`{name}`" for name in sensitivity.FORMATS)
    assert f"the choice is among {', '.join(first)} and {last}." in PAGE


def test_the_sizes_are_those_of_the_code():
    source = open_source(default_model())
    config = describe(source.fields, source.vocabulary, source.tensors)
    widths = [matrices[0].columns for matrices in inputs_of(config.blocks[0]) if matrices]
    assert len(widths) == 4
    layer = sum(4 * k * k for k in widths)
    on_disk = config.layers * layer + 4 * config.hidden**2
    assert f"{on_disk / 1e6:.0f} MB on disk, {layer / 1e6:.0f} MB in memory" in PAGE
    assert f"| {config.layers * sum(8 * k for k in widths) / 1e6:.1f} MB |" in PAGE
    assert f"| {8 * config.hidden * TOKENS / 1e6:.0f} MB |" in PAGE
    assert f"{round(len(default_text().encode()) / 1000)} KB that the package carries" in PAGE
    assert f"At most {TOKENS} tokens" in PAGE
    assert f"windows of {WINDOW} tokens" in PAGE
    large = 4 * (3 * 4096**2 + 14336**2)
    assert f"takes {large / 1e9:.1f} GB for each layer: {32 * large / 1e9:.0f} GB on disk" in PAGE
    mixture = 4 * (3 * 4096**2 + 8 * (4096**2 + 14336**2))
    assert (
        f"8 experts of these sizes, take {mixture / 1e9:.1f} GB in memory and {32 * mixture / 1e9:.0f} GB on disk"
        in PAGE
    )
