"""Files of GPTQ in order and of tune in other programs: their own loaders read them, and their perplexity is ours.

llama.cpp has no build here. Its perplexities of these files are recorded (make_perplexity_vectors.py), as are the bits
that it makes of each type (test_ggml.py) and its logits of models (test_architectures.py).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import first
from llm_architectures import write_model
from quantized_files import FILES, TOKENS, write_file
from transformers import AutoModelForCausalLM

import billfish as bf
from billfish.llm import load

pytestmark = pytest.mark.torch
TEXT = "ab abba, what is this? A few words of a text; 12 numbers and more. " * 8
WINDOW = 48
LLAMA_CPP = json.loads((Path(__file__).parents[1] / "support" / "vectors" / "perplexity.json").read_text())
ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # transformers reads no other from GGUF


def by_transformers(folder: Path, **arguments):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments)
    with torch.no_grad():
        return lambda ids: model(torch.tensor([ids])).logits[0].detach()


def by_mlx_lm(folder: Path):
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return lambda ids: torch.from_numpy(np.array(model(mx.array([ids]))[0].astype(mx.float32)))


LOADERS = {
    "gguf": ("q4_0", lambda path: by_transformers(path.parent, gguf_file=path.name)),
    "compressed-tensors": ("u4b8:32", by_transformers),
    "mlx": ("affine4:32", by_mlx_lm),
}


@pytest.mark.parametrize(("format", "method"), first(3, FILES))
def test_perplexity_is_that_of_llama_cpp(tmp_path, format, method):
    """It got this file, and then the file that its own quantizer decoded to float32."""
    model = load(write_file(tmp_path, format, method), device="cpu", progress=False)
    tokens = model.tokenizer.encode(TEXT, special=False)[:TOKENS]
    recorded = LLAMA_CPP["perplexity"][f"{format}, {method}"]
    for activations, theirs, relative in (("exact", "llama_cpp_floats", 2e-4), ("q8", "llama_cpp", 2e-2)):
        ours = bf.llm.evaluate(model, tokens, activations=activations, window=WINDOW).perplexity
        assert ours == pytest.approx(recorded[theirs], rel=relative)


@pytest.mark.parametrize("target", LOADERS)
def test_tuned_files_have_our_perplexity_elsewhere(tmp_path, target):
    format, loader = LOADERS[target]
    write_model(tmp_path / "in", "llama3", rope_parameters=ROPE)
    (tmp_path / "text.txt").write_text(TEXT)
    suffix = ".gguf" if target == "gguf" else ""
    quantized, tuned = tmp_path / f"quantized{suffix}", tmp_path / f"tuned{suffix}"
    text = {"progress": False}
    bf.quantize_checkpoint(
        tmp_path / "in", quantized, format, to=target, method="gptq", calibrate=tmp_path / "text.txt", **text
    )
    settings = {"against": tmp_path / "in", "text": tmp_path / "text.txt", "tokens": 192, "window": 48, "rate": 0.01}
    bf.tune_checkpoint(quantized, tuned, **settings, device="cpu", **text)
    perplexities = []
    for path in (quantized, tuned):
        ours = load(path, device="cpu", progress=False)
        tokens = ours.tokenizer.encode(TEXT, special=False)[:144]
        found = bf.llm.evaluate(ours, tokens, activations="exact", window=WINDOW)
        theirs, losses = loader(path), []
        for start in range(0, len(tokens), WINDOW):
            ids = tokens[start : start + WINDOW]
            losses.append(torch.nn.functional.cross_entropy(theirs(ids)[:-1], torch.tensor(ids[1:]), reduction="none"))
        assert math.exp(torch.cat(losses).mean()) == pytest.approx(found.perplexity, rel=2e-4)
        perplexities.append(found.perplexity)
    assert abs(perplexities[0] / perplexities[1] - 1) > 1e-3  # it was tuned
