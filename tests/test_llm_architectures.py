"""Every architecture against transformers, from a folder, from a GGUF file, quantized, and token by token."""

from __future__ import annotations

import numpy as np
import pytest
from llm_architectures import MODELS, TOKENS, write_model
from llm_folders import edit, in_transformers
from support import assert_same_bits

import billfish as bf
from billfish.llm import load
from billfish.llm.architectures import ARCHITECTURES

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Writes a model, once."""
    folder = tmp_path_factory.mktemp("models")

    def write(name: str):
        if not (folder / name).exists():
            write_model(folder / name, name)
        return folder / name

    return write


def close(actual: np.ndarray, expected: np.ndarray, relative: float = 2e-5) -> bool:
    return bool(np.abs(actual - expected).max() <= relative * np.abs(expected).max())


def test_every_architecture_is_here():
    tested = {architecture for architecture, _, _ in MODELS.values()} | {"qwen2", "gemma"}  # test_llm_folders.py
    assert tested == set(ARCHITECTURES)


@EVERY_MODEL
def test_a_folder_gives_the_logits_of_transformers(folder_of, name):
    model = load(folder_of(name), device="cpu")
    assert model.config.architecture == MODELS[name][0]
    assert close(model.logits(TOKENS), in_transformers(folder_of(name), TOKENS))


@EVERY_MODEL
def test_a_gguf_file_gives_the_logits_of_its_folder(folder_of, name, tmp_path):
    bf.convert(folder_of(name), tmp_path / "m.gguf", "gguf")
    logits = load(tmp_path / "m.gguf", device="cpu").logits(TOKENS)
    assert close(logits, load(folder_of(name), device="cpu").logits(TOKENS), 1e-5)
    assert close(logits, in_transformers(folder_of(name), TOKENS))
