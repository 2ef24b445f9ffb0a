"""Attention over long texts on the CPU: blocks, slices that threads share, keys and values in float16 and int8."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_same_bits
from kv_cache_support import by_position, int8_by_position
from llm_int8_oracle import Int8Oracle, quantize, rotate
from llm_models import Small, write_model
from llm_oracle import Oracle

import billfish as bf
from billfish.backends import BACKENDS
from billfish.backends.cpu import _cpu
from billfish.llm import load

LENGTH = 600  # two slices and a part of the third; the last block of 64 is not full
TOKENS = np.random.default_rng(4).integers(4, 260, LENGTH).tolist()
LONG = {
    "alone": Small(layers=1, heads=2, kv_heads=2, head_size=16, context=1024),
    "three-share": Small(layers=2, heads=6, kv_heads=2, head_size=48, context=1024, seed=1),
    "five-share": Small(layers=1, heads=5, kv_heads=1, head_size=32, context=1024, seed=2),
}
EVERY_MODEL = pytest.mark.parametrize("name", LONG)
EVERY_TYPE = pytest.mark.parametrize("cache_type", ["float32", "float16", "int8"])


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, small in LONG.items():
        write_model(folder / f"{name}.gguf", small)
    return lambda name: folder / f"{name}.gguf"


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@EVERY_MODEL
@pytest.mark.parametrize("level", _cpu.levels())
def test_long_texts_get_the_logits_of_the_oracle(path_of, name, level, monkeypatch):
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    expected = Oracle(path_of(name)).logits(TOKENS)
    assert distance(load(path_of(name)).logits(TOKENS), expected) <= 2e-5
    assert 1e-6 < distance(load(path_of(name), cache_type="float16").logits(TOKENS), expected) <= 2e-2


@EVERY_MODEL
@pytest.mark.parametrize("level", _cpu.levels())
def test_int8_gives_the_logits_of_its_oracle(path_of, name, level, monkeypatch):
    """Most logits are as near as sums in float32 allow. Some codes differ by one, where a number falls between two, and
    move logits by a small part of what rounding moves them."""
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    exact, expected = Oracle(path_of(name)).logits(TOKENS), Int8Oracle(path_of(name)).logits(TOKENS)
    actual = load(path_of(name), cache_type="int8").logits(TOKENS)
    assert np.median(np.abs(actual - expected)) <= 1e-5
    assert np.sqrt(np.mean((actual - expected) ** 2)) <= 0.05 * np.sqrt(np.mean((actual - exact) ** 2))


@EVERY_MODEL
@pytest.mark.parametrize("level", _cpu.levels())
def test_int8_codes_and_scales(path_of, name, level, monkeypatch):
    """Those of the first layer, from the keys and values that a float32 cache has."""
    monkeypatch.setattr(BACKENDS["cpu"], "level", level)
    models = [load(path_of(name), cache_type=type) for type in ("float32", "int8")]
    exact, codes = (model.cache() for model in models)
    for model, cache in zip(models, (exact, codes), strict=True):
        model.decoder.run([(cache, TOKENS[:100])], "exact")
    keys, values = (stored[0, :, :100].astype(np.float64) for stored in by_position(exact))
    for numbers, (scale, whole) in zip((rotate(keys), values), int8_by_position(codes, level), strict=True):
        expected, expected_scale = quantize(numbers, 127)
        np.testing.assert_allclose(scale[:, :100], expected_scale[..., 0], rtol=1e-6)
        assert np.abs(whole[:, :100] - expected).max() <= 1
        assert (whole[:, :100] == expected).mean() > 0.999


@EVERY_MODEL
@EVERY_TYPE
def test_however_a_prompt_is_cut_it_gets_the_same_bits(path_of, name, cache_type):
    model = load(path_of(name), cache_type=cache_type)
    whole, parts, beside = model.cache(), model.cache(), model.cache()
    expected = model.decoder.run([(whole, TOKENS)], "q16")
    rows, at = [], 0
    for count in (1, 63, 65, 3, 256, 33, 100, 1, 1, 77):
        ahead = model.decoder.run([(beside, TOKENS[at : at + 40]), (parts, TOKENS[at : at + count])], "q16")
        rows.append(ahead[-count:])
        at += count
    assert at == LENGTH
    assert_same_bits(np.concatenate(rows), expected)
    copy = whole.copy()
    copy.rollback(300)
    assert_same_bits(model.decoder.run([(copy, TOKENS[300:])], "q16"), expected[300:])


def test_int8_takes_a_byte_a_number_and_a_scale_for_each_head(path_of):
    exact, int8 = (load(path_of("three-share"), cache_type=type).cache() for type in ("float32", "int8"))
    assert int8.nbytes * 4 * 48 == exact.nbytes * (48 + 4)


@EVERY_MODEL
@pytest.mark.parametrize("cache_type", ["float32", "float16"])
def test_single_tokens_see_what_rows_of_a_text_see(path_of, name, cache_type):
    """A slice at a time, by several threads, and heads together: the same attention as that of whole rows."""
    model = load(path_of(name), cache_type=cache_type)
    expected, cache = model.logits(TOKENS), model.cache()
    for tokens in (TOKENS[:250], TOKENS[250:593]):
        model.decoder.run([(cache, tokens)], "exact")
    rows = [model.decoder.run([(cache, [token])], "exact") for token in TOKENS[593:]]
    assert distance(model.decoder.logits(np.concatenate(rows), "exact"), expected[593:]) <= 2e-5


@EVERY_MODEL
@EVERY_TYPE
def test_any_number_of_threads_gives_the_same_bits(path_of, name, cache_type):
    model, before, results = load(path_of(name), cache_type=cache_type), _cpu.threads(), []
    try:
        for count in (1, 2, 3, 5):
            _cpu.set_threads(count)
            caches = model.cache(), model.cache()
            rows = [model.decoder.run([(caches[0], TOKENS), (caches[1], TOKENS[:70])], "exact")]
            rows += [model.decoder.run([(cache, [token]) for cache in caches], "exact") for token in (5, 6, 7)]
            results.append(np.concatenate(rows))
    finally:
        _cpu.set_threads(before)
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_float16_takes_half_the_memory_and_rounds_to_nearest(path_of):
    model = load(path_of("alone"))
    exact, half = model.cache(), load(path_of("alone"), cache_type="float16").cache()
    assert (exact.state.keys(0).dtype, half.state.keys(0).dtype) == (np.float32, np.float16)
    assert half.nbytes == exact.nbytes // 2
    half.config = exact.config  # what it is beside its model's
    for cache in (exact, half):
        model.decoder.run([(cache, TOKENS[:100])], "exact")
    # Of the first layer, which has no attention before it.
    for stored, rounded in zip(by_position(exact), by_position(half), strict=True):
        assert_same_bits(stored[:1].astype(np.float16), rounded[:1])


def test_what_is_too_large_for_float16_becomes_its_largest_number(path_of):
    def enlarged(name, tensor):
        return bf.dequantize(tensor) * np.float32(1e6) if name == "blk.0.attn_v.weight" else tensor

    model = load(path_of("alone"), convert=enlarged, cache_type="float16")
    cache = model.cache()
    hidden = model.decoder.run([(cache, TOKENS[:8])], "exact")
    assert np.abs(cache.state.values(0)).max() == 65504
    assert np.isfinite(hidden).all()


def test_a_type_that_no_cache_has_is_refused(path_of):
    problem = r"cache_type.*'float8'.*'float32' or 'float16' or 'int8' on cpu"
    with pytest.raises(bf.DataError, match=problem):
        load(path_of("alone"), cache_type="float8")
