"""The best token of several texts: found with x in 8 bits, settled with x in 16."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from common import assert_same_bits
from llm_models import Small, write_model

from billfish.backends.cpu import _cpu
from billfish.llm import load
from billfish.llm.sampler import Sampling

HEADS = {"q8_0": "Q8_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "f16": "F16"}


@pytest.fixture(scope="module", params=HEADS)
def decoder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(path, Small(quantization=HEADS[request.param], hidden=256))
    return load(path, device="cpu", progress=False).decoder


def hidden_states(decoder, rows: int, outlier: float = 1.0) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, decoder.config.hidden)).astype(np.float32)
    x[:, 5] *= outlier
    return x


@pytest.mark.parametrize("outlier", [1, 1000])
@pytest.mark.parametrize("rows", [2, 3, 8, 16, 33])
def test_what_is_near_the_best_is_in_16_bits_and_the_rest_in_8(decoder, rows, outlier):
    x = hidden_states(decoder, rows, outlier)
    rough, fine, mixed = (decoder._scores(x, digits) for digits in (1, 2, _cpu.BEST_OF_16))
    assert_same_bits(mixed.argmax(1), fine.argmax(1))
    near = rough >= rough.max(1, keepdims=True) - 0.999 * rough.std(1, keepdims=True)
    assert near.any(1).all()
    assert_same_bits(mixed[near], fine[near])
    assert np.all((mixed == fine) | (mixed == rough))


def test_tiles_far_below_the_best_stay_in_8_bits(decoder):
    x = hidden_states(decoder, 1)
    rough, fine, mixed = (decoder._scores(x, digits) for digits in (1, 2, _cpu.BEST_OF_16))
    assert np.array_equal(rough, fine) or (mixed != fine).any()  # a plain head is multiplied as it is


def test_scores_that_move_far_are_all_settled(tmp_path):
    """A number of x that no weight multiplies takes the bits of its 31 neighbours."""
    path = tmp_path / "small.gguf"
    write_model(path, Small(quantization="Q8_0", hidden=256))
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "output.weight":
            tensor.data[:, 2 + 5] = 0  # behind the scale of the first block
    decoder = load(path, device="cpu", progress=False).decoder
    x = hidden_states(decoder, 8, outlier=1e4)
    rough, fine, mixed = (decoder._scores(x, digits) for digits in (1, 2, _cpu.BEST_OF_16))
    assert (rough.argmax(1) != fine.argmax(1)).any()
    assert_same_bits(mixed, fine)


def test_a_row_that_is_not_finite_spoils_no_other(decoder):
    x = hidden_states(decoder, 8)
    x[3, 7] = np.nan
    fine, mixed = (decoder._scores(x, digits) for digits in (2, _cpu.BEST_OF_16))
    others = np.arange(8) != 3
    assert_same_bits(mixed[others].argmax(1), fine[others].argmax(1))
    assert np.isnan(mixed[3]).all()


def test_any_number_of_threads_gives_the_same_bits(decoder):
    x, before, found = hidden_states(decoder, 8), _cpu.threads(), []
    try:
        for threads in (1, 2, 3):
            _cpu.set_threads(threads)
            found.append(decoder._scores(x, _cpu.BEST_OF_16))
    finally:
        _cpu.set_threads(before)
    for other in found[1:]:
        assert_same_bits(found[0], other)


@pytest.mark.parametrize("activations", ["q8", "q16", None])
def test_several_texts_get_the_best_tokens_of_16_bits(decoder, activations):
    texts = [[5, 6, 7 + i] for i in range(5)]
    caches = [decoder.cache() for _ in texts]
    chosen = decoder.choose(list(zip(caches, texts, strict=True)), [Sampling().sampler() for _ in texts], activations)
    again = [decoder.cache() for _ in texts]
    states = decoder.run(list(zip(again, texts, strict=True)), activations)[2::3]
    assert chosen == decoder.logits(states, "q16").argmax(1).tolist()


def test_a_model_that_drafts_takes_all_logits_in_16_bits(tmp_path, monkeypatch):
    """Its answers are equal by proof: with one row or two, nothing is found with 8 bits. So it is from the first draft
    on."""
    write_model(tmp_path / "small.gguf", Small(quantization="Q8_0", hidden=256))
    model, asked = load(tmp_path / "small.gguf", device="cpu", progress=False), []
    scores = model.decoder._scores
    monkeypatch.setattr(model.decoder, "_scores", lambda x, digits: asked.append(digits) or scores(x, digits))
    texts, samplers = [[5, 6, 7 + i] for i in range(3)], [Sampling().sampler() for _ in range(3)]
    plain = model.decoder.choose([(model.cache(), text) for text in texts], samplers, "q8")
    model.generate(texts[0], max_tokens=1, draft="ngram")
    assert model.decoder.choose([(model.cache(), text) for text in texts], samplers, "q8") == plain
    assert asked == [_cpu.BEST_OF_16, 2, _cpu.BEST_OF_16]
    asked.clear()
    model.generate([5] * 9, max_tokens=12, draft="ngram", logit_bias={5: 100.0})
    asked.clear()
    assert model.decoder.choose([(model.cache(), text) for text in texts], samplers, "q8") == plain
    [*_, choices] = model.decoder.verify([(model.cache(), [5])], samplers[:1], [[6, 7, 8]], "q8")
    assert choices
    assert asked == [2, 2]


@pytest.mark.parametrize(
    ("how", "best"),
    [
        ({}, True),
        ({"top_k": 3, "top_p": 0.5, "seed": 4}, True),  # which do not matter at temperature 0
        ({"temperature": 0.5}, False),
        ({"presence_penalty": 1.0}, False),
        ({"repetition_penalty": 2.0}, False),
        ({"logit_bias": {3: 1.0}}, False),
    ],
)
def test_who_takes_the_best(how, best):
    assert Sampling(**how).sampler().takes_best == best
