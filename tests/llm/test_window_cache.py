"""Layers with a window keep a ring of positions: memory that does not grow with the text, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
from common import assert_same_bits
from llm_architectures import write_model

from billfish.backends.cpu import _cpu
from billfish.llm import load
from billfish.llm.sampler import Sampling

WINDOW, LONG = 7, 700
TEXT = [3 + (7 * i * i + 3 * i) % 64 for i in range(LONG)]


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "gpt-oss", max_position_embeddings=2048)  # layers 0 and 2 have windows
    return load(folder, device="cpu", cache_type=request.param)


def fed(model, cache, tokens: list[int], parts: int = 96) -> np.ndarray:
    """Hidden states of the last tokens."""
    for start in range(0, len(tokens), parts):
        rows = model.decoder.run([(cache, tokens[start : start + parts])], "q16")
    return rows


def positions(cache, layer: int) -> int:
    return cache.state.keys(layer).shape[1] * _cpu.CACHE_BLOCK


def test_a_window_bounds_the_memory_of_its_layers(model):
    cache = model.decoder.cache(64)
    fed(model, cache, TEXT)
    assert [positions(cache, layer) for layer in range(3)] == [320, cache.capacity, 320]
    assert cache.capacity >= LONG
    assert cache.nbytes == sum(cache.state.keys(i).nbytes + cache.state.values(i).nbytes for i in range(3))


def test_a_ring_gives_the_bits_of_a_cache_of_all_positions(model):
    ring, whole = model.decoder.cache(64), model.decoder.cache(64)
    whole.reserve_rows(0, LONG + 64)
    assert positions(whole, 0) > LONG
    assert_same_bits(fed(model, ring, TEXT), fed(model, whole, TEXT))
    for token in (5, 9, 11):
        rows = [model.decoder.run([(cache, [token])], "q16") for cache in (ring, whole)]
        assert_same_bits(*rows)


def test_more_rows_at_once_than_a_ring_has_room_for(model):
    cache, whole = model.decoder.cache(64), model.decoder.cache(64)
    fed(model, cache, TEXT[:300])
    whole.reserve_rows(0, LONG)
    fed(model, whole, TEXT[:300])
    rows = [model.decoder.run([(each, TEXT[300:])], "q16") for each in (cache, whole)]
    assert_same_bits(*rows)


@pytest.mark.parametrize(("kept", "restored"), [(690, 690), (450, 450), (100, 0), (3, 0), (0, 0)])
def test_what_a_ring_has_lost_is_read_again(model, kept, restored):
    """A text that goes on behind `kept` tokens re-reads all of it where a window has forgotten what it sees."""
    cache, sampler = model.decoder.cache(64), Sampling().sampler()
    fed(model, cache, TEXT)
    assert cache.restorable(kept) == restored
    text = [*TEXT[:kept], 70, 71, 72]
    expected, _ = model.decoder.go_on(model.decoder.cache(64), text, sampler, "q16")
    assert model.decoder.go_on(cache, text, sampler, "q16") == (expected, restored)
    assert cache.tokens == text


def test_a_copy_goes_on_where_the_ring_was(model):
    cache = model.decoder.cache(64)
    fed(model, cache, TEXT)
    other = cache.copy()
    assert [positions(other, layer) for layer in (0, 2)] == [320, 320]
    rows = [model.decoder.run([(each, [5, 6, 7])], "q16") for each in (cache, other)]
    assert_same_bits(*rows)
    begun = model.decoder.cache(64)
    begun.begin_as(cache, 695)
    fed(model, other := model.decoder.cache(64), TEXT[:695])
    last = [model.decoder.run([(each, [5])], "q16") for each in (begun, other)]
    assert_same_bits(*last)
