"""Every architecture on a fake GPU, whose kernels NumPy computes, beside the CPU's exact mode."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cases import first
from cuda_numpy import NumpyGpu
from llm_architectures import MODELS, TOKENS, write_model

from billfish.llm import load
from billfish.llm.sampler import Sampling

LIMIT = 1e-2  # of the norm of logits: numbers between products are float16
# Together these have every kind of part and nearly every setting.
OFTEN = ("gemma2", "gemma4", "gemma4-moe", "gpt-oss", "olmo3", "ministral3", "qwen35moe", "lfm2", "granitehybrid")


@pytest.fixture
def gpu(monkeypatch, request):
    """All that was taken of it is given back when the model is gone."""
    fake = NumpyGpu(monkeypatch)
    yield fake
    request.node.funcargs.clear()  # pytest's own references
    gc.collect()
    assert not fake.live
    monkeypatch.undo()
    fake.forget()


@pytest.mark.parametrize("name", first(len(OFTEN), [*OFTEN, *sorted({*MODELS} - {*OFTEN})]))
def test_logits_are_the_cpus(gpu, name, tmp_path):
    """A prompt in two pieces, then token by token beside another text."""
    write_model(tmp_path, name, max_position_embeddings=256)
    cpu = load(tmp_path, device="cpu")
    model = load(tmp_path, device="cuda")
    text = [*TOKENS, *TOKENS[5:30]]
    expected = cpu.logits(text, activations="exact")
    model.decoder.chunk = 64
    logits = model.logits(text)
    errors = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.median(errors) < LIMIT, errors  # of an expert's router, a score may tie with another
    caches = [model.cache() for _ in range(2)]
    samplers = [Sampling().sampler() for _ in caches]
    fed = [text[:30], text[:62]]
    for i in range(4):  # past the end of a page
        chosen = model.decoder.choose(list(zip(caches, fed, strict=True)), samplers, None)
        for start, token in zip((30, 62), chosen, strict=True):
            scores = expected[start + i - 1]
            assert scores[token] >= scores.max() - 0.1 * scores.std()
        fed = [[text[30 + i]], [text[62 + i]]]
