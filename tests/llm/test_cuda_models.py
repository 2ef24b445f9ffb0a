"""Every architecture on a fake GPU, whose kernels NumPy computes, beside the CPU's exact mode."""

from __future__ import annotations

import gc

import cuda_numpy
import numpy as np
import pytest
from cases import first
from cuda_numpy import NumpyGpu
from cuda_routing import clear_text, near_ties
from llm_architectures import MODELS, TOKENS, write_model
from safetensors.numpy import load_file, save_file

from billfish.llm import load
from billfish.llm.decoder_base import PENDING
from billfish.llm.sampler import Sampling

LIMIT = 1e-2  # of the norm of logits: numbers between products are float16
FP8_LIMIT = 0.2  # random weights make attention sharp, so that steps of an eighth show
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
    check_steps_of_both(model, text, expected, caches)


# Heads of 32 and 64 numbers in layers with and without windows; sinks; keys that layers share.
@pytest.mark.parametrize("name", first(2, ["gpt-oss", "gemma4", "gemma2", "qwen35moe"]))
def test_logits_over_an_fp8_cache_are_near_the_cpus(gpu, name, tmp_path):
    write_model(tmp_path, name, max_position_embeddings=256)
    cpu, model = load(tmp_path, device="cpu"), load(tmp_path, device="cuda", cache_type="fp8")
    text = [*TOKENS, *TOKENS[5:30]]
    expected = cpu.logits(text, activations="exact")
    model.decoder.chunk = 64
    found = model.logits(text)
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert LIMIT / 4 < np.median(errors) < FP8_LIMIT, errors
    caches, samplers = [model.cache() for _ in range(2)], [Sampling().sampler() for _ in range(2)]
    chosen = model.decoder.choose([(caches[0], text[:30]), (caches[1], text[:62])], samplers, None)
    for end, token in zip((30, 62), chosen, strict=True):
        assert found[end - 1][token] >= found[end - 1].max() - 0.1 * found[end - 1].std()


def test_all_rows_of_a_mixture_are_right_where_no_row_is_near_a_tie(gpu, tmp_path):
    write_model(tmp_path, "gemma4-moe", max_position_embeddings=256)
    cpu, model = (load(tmp_path, device=device) for device in ("cpu", "cuda"))
    assert near_ties(model, TOKENS).any()
    text = clear_text(model, TOKENS[:32], range(4, 64))
    expected, found = cpu.logits(text, activations="exact"), model.logits(text)
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < LIMIT


def test_activations_that_float16_cannot_hold_are_clamped(gpu, tmp_path, monkeypatch):
    """Values of attention and SwiGLU are beyond 65,504 in every row, and nothing becomes infinite."""
    write_model(tmp_path, "llama3", max_position_embeddings=256)
    file = tmp_path / "model.safetensors"
    large = {
        name: a * (1e5 if name.endswith(("v_proj.weight", "up_proj.weight")) else 1)
        for name, a in load_file(file).items()
    }
    save_file(large, file, {"format": "pt"})
    beyond, round_to_half = [0, 0], cuda_numpy.finite

    def watched(x: np.ndarray) -> np.ndarray:
        beyond[0] += int((np.abs(x) > 65504).sum())
        made = round_to_half(x)
        beyond[1] += int((~np.isfinite(made)).sum())
        return made

    monkeypatch.setattr(cuda_numpy, "finite", watched)
    model = load(tmp_path, device="cuda")
    assert np.isfinite(model.logits(TOKENS[:40])).all()
    cache, sampler = model.cache(), Sampling().sampler()
    for fed in (TOKENS[:40], TOKENS[40:41], TOKENS[41:42]):
        model.decoder.choose([(cache, fed)], [sampler], None)
    assert beyond[0] > 1000
    assert beyond[1] == 0


def check_steps_of_both(model, text, expected, caches):
    """Steps of prompts and of texts that decode, each submitted before anybody asks for tokens: every row is the CPU's,
    though what is fed after the first token is what the model has chosen."""
    other, samplers = model.cache(), [Sampling().sampler() for _ in range(3)]
    starts = [len(cache.tokens) for cache in caches]
    first = model.decoder.submit(
        [*((cache, [text[start]]) for cache, start in zip(caches, starts, strict=True)), (other, text[:37])],
        samplers, None,
    )  # fmt: skip
    second = model.decoder.submit(
        [(caches[0], [PENDING]), (other, text[37:60]), (caches[1], [PENDING])], samplers, None
    )
    tokens = first.tokens()
    for place, token in zip((*starts, 36), tokens, strict=True):
        assert expected[place][token] >= expected[place].max() - 0.1 * expected[place].std()
    assert [cache.tokens for cache in caches] == [
        [*text[: start + 1], token] for start, token in zip(starts, tokens, strict=False)
    ]
    for cache, token in zip((caches[0], caches[1]), second.tokens()[::2], strict=True):
        again = model.logits(cache.tokens)[-1]
        assert again[token] >= again.max() - 0.1 * again.std()
    row = expected[59]
    assert row[second.tokens()[1]] >= row.max() - 0.1 * row.std()
