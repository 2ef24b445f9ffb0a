"""Models with experts run from every layout of their files, and compute what they compute from GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import stack_models as models
import torch
from llm_folders import write_tokenizer

import billfish as bf
from billfish.llm import load

TOKENS = [0, 5, 68, 20, 33, 7, 41, 66, 2, 68]


def logits_of(made: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return made(torch.tensor([TOKENS])).logits[0].numpy()


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 1e-3 * np.abs(b).max())


@pytest.fixture(scope="module")
def in_q4_0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts whose weights every layout holds as they are."""
    folder = tmp_path_factory.mktemp("mixture")
    models.model("qwen3moe").save_pretrained(folder / "plain")
    write_tokenizer(folder / "plain")
    bf.quantize_checkpoint(folder / "plain", folder / "q4_0.gguf", "q4_0")
    return folder / "q4_0.gguf"


@pytest.mark.parametrize("to", ["gptq", "awq", "mlx", "compressed-tensors", "billfish"])
def test_a_mixture_runs_from_folders_of_every_layout(tmp_path, in_q4_0, to):
    assert bf.load(in_q4_0).describe("blk.0.ffn_up_exps.weight").format.name == "q4_0"
    assert not bf.convert(in_q4_0, tmp_path / "out", to).quantized
    expected = load(in_q4_0).logits(TOKENS)
    assert close(load(tmp_path / "out").logits(TOKENS), expected)
    assert bf.verify(in_q4_0, tmp_path / "out")


def test_gpt_oss_runs_from_its_own_files(tmp_path):
    made, _ = models.gpt_oss_folder(tmp_path / "in")
    write_tokenizer(tmp_path / "in")
    expected = logits_of(made)
    model = load(tmp_path / "in")
    assert close(model.logits(TOKENS), expected)
    assert "mxfp4" in repr(model)
    bf.convert(tmp_path / "in", tmp_path / "out.gguf", "gguf")
    assert close(load(tmp_path / "out.gguf").logits(TOKENS), expected)
