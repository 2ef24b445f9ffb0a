"""A model that runs has left its file behind: whoever overwrites or cuts that file changes no answer. Nothing that the
file says is left out."""

from __future__ import annotations

import os

import numpy as np
import pytest
from llm_folders import write_random
from llm_models import Small, write_model

import billfish as bf
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


@pytest.mark.promise("files", "overwriting a file changes nothing in a model that was loaded from it")
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


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight",  # norms of heads, which Llamas do not have
        "blk.1.ffn_gate_shexp.weight",  # an expert for all tokens
        "blk.2.attn_norm.weight",  # a layer more than `block_count` says
        "output.bias",
    ],
)
def test_a_tensor_that_would_not_be_used_is_refused_by_name(tmp_path, name):
    write_model(tmp_path / "model.gguf", Small(), more={name: np.ones(64, np.float32)})
    with pytest.raises(bf.ModelError, match=rf"no tensor {name}"):
        load(tmp_path / "model.gguf", device="cpu")


def test_frequencies_in_old_files_are_left_alone(tmp_path):
    write_model(tmp_path / "model.gguf", Small(), more={"blk.0.attn_rot_embd.weight": np.ones(16, np.float32)})
    load(tmp_path / "model.gguf", device="cpu")


@pytest.mark.parametrize("field", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_of_positions_needs_no_type(tmp_path, field):
    """As llama.cpp reads it; the second name is of old files."""
    write_model(tmp_path / "model.gguf", Small(fields={f"llama.{field}": 2.0}))
    scaling = load(tmp_path / "model.gguf", device="cpu").config.ropes[0].scaling
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)
