"""SmolLM2 from folders of every layout says what it says from a GGUF file of the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

import billfish as bf
from billfish.llm import default_model, load

PROMPT = "What is the capital of France?"


def text(path: Path) -> str:
    return "".join(load(path).generate(PROMPT, max_tokens=8))


@pytest.fixture(scope="module")
def in_q4_0(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A GGUF file whose weights every layout holds as they are, and what it says."""
    path = tmp_path_factory.mktemp("smollm2") / "q4_0.gguf"
    bf.quantize_checkpoint(default_model(), path, "q4_0", method="rtn", requantize=True, progress=False)
    return path, text(path)


@pytest.mark.full  # test_folders.py has small models of these layouts
@pytest.mark.parametrize("to", ["gptq", "awq", "mlx", "compressed-tensors"])
def test_the_same_text_from_quantized_folders(tmp_path, in_q4_0, to):
    path, expected = in_q4_0
    report = bf.convert(path, tmp_path / "out", to, progress=False)
    assert not report.quantized
    assert text(tmp_path / "out") == expected
    assert len(expected) > 8


@pytest.mark.full  # make docs-commands converts to bfloat16 and asks that model
def test_the_same_text_from_bfloat16(tmp_path):
    bf.convert(default_model(), tmp_path / "out", "plain", dtype="bfloat16", progress=False)
    bf.convert(tmp_path / "out", tmp_path / "out.gguf", "gguf", progress=False)
    assert bf.load(tmp_path / "out").describe("model.layers.0.mlp.up_proj.weight").dtype == "BF16"
    assert text(tmp_path / "out") == text(tmp_path / "out.gguf")
