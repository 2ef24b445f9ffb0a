"""A model that runs has left its file behind: whoever overwrites or cuts that file changes no answer."""

from __future__ import annotations

import os

import numpy as np
import pytest
from llm_folders import write_random
from llm_models import Small, write_model

from billfish.llm import load

PROMPT = [{"role": "user", "content": "ab ba"}]
MODELS = {
    "quantized": Small(),
    "tied": Small(tied=True),
    "plain": Small(quantization="F32"),
    "halves": Small(quantization="BF16", embedding="F16"),
    "biases": Small("qwen2"),
    "norms of heads": Small("qwen3", embedding="Q4_K", hidden=256),
    "gemma": Small("gemma"),
}


@pytest.mark.parametrize("name", [*MODELS, "folder"])
def test_a_running_model_reads_nothing_of_its_file(tmp_path, name):
    if name == "folder":
        path, file = tmp_path, tmp_path / "model.safetensors"
        write_random(path, "llama")
    else:
        path = file = tmp_path / "model.gguf"
        write_model(path, MODELS[name])
    model = load(path)
    tokens = list(range(60))
    expected, answer = model.logits(tokens), "".join(model.generate(PROMPT, max_tokens=8))
    size = file.stat().st_size
    with file.open("r+b") as content:
        content.write(os.urandom(size))
    assert np.array_equal(model.logits(tokens), expected)
    assert "".join(model.generate(PROMPT, max_tokens=8)) == answer
    os.truncate(file, 0)  # what is mapped and touched now is SIGBUS
    assert np.array_equal(model.logits(tokens), expected)
    assert "".join(model.generate(PROMPT, max_tokens=8)) == answer
