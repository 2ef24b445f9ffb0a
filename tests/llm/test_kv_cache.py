"""Caches that are interrupted, shared, or of another model. Small random models only."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from kv_cache_support import by_position
from llm_models import Small, write_model

import billfish as bf
from billfish.llm import Cache, load
from billfish.llm.cpu import CpuDecoder
from billfish.llm.kv_cache import shared_length
from billfish.llm.sampler import Sampling

TOKENS = np.random.default_rng(3).integers(4, 260, 40).tolist()
LLM = str(Path(bf.__file__).parent / "llm")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(path, Small(context=4 * CpuDecoder.chunk))
    return load(path)


def next_token(model, cache: Cache, text: list[int]) -> tuple[int, int]:
    return model.decoder.go_on(cache, text, Sampling().sampler(), "exact")


def holds(model, cache: Cache, text: list[int]) -> bool:
    """Whether the cache's keys and values are those of a text, computed anew."""
    if cache.tokens != text or cache.capacity < len(text):
        return False
    fresh = model.decoder.cache(max(1, cache.capacity))
    if text:
        model.decoder.run([(fresh, text)], "exact")
    pairs = zip(by_position(cache), by_position(fresh), strict=True)
    return all(np.allclose(a[:, :, : len(text)], b[:, :, : len(text)], atol=1e-4) for a, b in pairs)


# ---- interruptions --------------------------------------------------------------------------------------------------


class Interrupter:
    """Raises KeyboardInterrupt before the n-th instruction that runs in billfish/llm."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(LLM):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(call, at: int) -> bool:
    """Whether `call` was interrupted before its instruction number `at`."""
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # in a frame at hand, or settrace of Python 3.12 lets no frame trace them
    sys.settrace(Interrupter(at))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.promise("threads", "an interrupt at any instruction, or a failed step, leaves KV caches valid")
def test_an_interrupt_at_any_instruction_leaves_a_cache_whole(model):
    """Its tokens are as before, or all those of the call; the keys are theirs, and the next run needs no repair."""
    start, more = TOKENS[:15], TOKENS[15:20]  # the room of 16 positions has to grow
    at, step = 1, 5  # a sample of the instructions
    while True:
        at += step
        cache = model.decoder.cache(16)
        model.decoder.run([(cache, start)], "exact")
        if not interrupted(lambda cache=cache: model.decoder.run([(cache, more)], "exact"), at):
            break
        assert cache.tokens in (start, start + more)
        assert holds(model, cache, cache.tokens), f"instruction {at}"
        next_token(model, cache, TOKENS)
        assert holds(model, cache, TOKENS), f"instruction {at}"
    assert at > 100


def test_an_interrupted_answer_leaves_a_prefix_of_its_text(model):
    expected = model.generate(TOKENS, max_tokens=4, activations="exact")
    list(expected)
    text = TOKENS + expected.tokens
    for at in range(1, 3000, 41):
        cache = model.cache()
        answer = model.stream(TOKENS, max_tokens=4, activations="exact", cache=cache)
        if not interrupted(lambda answer=answer: list(answer), at):
            break
        assert cache.tokens == text[: len(cache.tokens)]
        assert holds(model, cache, cache.tokens)
    assert at > 400


class Failing:
    """A native decoder whose runs fail after they have written keys."""

    def __init__(self, native, error: type[BaseException]) -> None:
        self._native, self._error = native, error

    def __getattr__(self, name):
        return getattr(self._native, name)

    def run(self, *arguments):
        self._native.run(*arguments)
        raise self._error


@pytest.mark.promise("threads", "an interrupt at any instruction, or a failed step, leaves KV caches valid")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_a_run_that_fails_leaves_all_caches_as_they_were(model, monkeypatch, error):
    caches = [model.cache() for _ in range(3)]
    for i, cache in enumerate(caches):
        model.decoder.run([(cache, TOKENS[: 5 + i])], "exact")
    with monkeypatch.context() as patch:
        patch.setattr(model.decoder, "_native", Failing(model.decoder._native, error))
        with pytest.raises(error):
            model.decoder.run([(cache, TOKENS[20:30]) for cache in caches], "exact")
    for i, cache in enumerate(caches):
        assert holds(model, cache, TOKENS[: 5 + i])


@pytest.mark.promise("inputs", "invalid text, token ids and KV caches of other models are refused")
@pytest.mark.parametrize("token", [-1, 261, 2**40, -(2**40)])
def test_tokens_that_are_none(model, token):
    cache = model.cache()
    model.decoder.run([(cache, [5])], "exact")
    with pytest.raises(bf.ModelError, match=rf"tokens.*token {token}.*tokens from 0 to 260"):
        model.decoder.embed([5, token])
    with pytest.raises(bf.ModelError, match=f"token {token}"):
        model.decoder.run([(cache, [6, token])], "exact")
    assert cache.tokens == [5]


# ---- sharing --------------------------------------------------------------------------------------------------------


def alone(model, prompt: list[int]) -> list[int]:
    answer = model.generate(prompt, max_tokens=12, activations="exact")
    list(answer)
    return answer.tokens


def test_two_answers_in_turns_on_one_cache_are_what_they_are_alone(model):
    cache, prompts = model.cache(), (TOKENS[:20], TOKENS[:9] + TOKENS[30:])
    settings = {"max_tokens": 12, "activations": "exact", "cache": cache}
    answers = [model.stream(prompt, **settings) for prompt in prompts]
    going = list(answers)
    while going:
        going = [answer for answer in going if next(answer, None) is not None]
    assert [answer.tokens for answer in answers] == [alone(model, prompt) for prompt in prompts]


def test_an_answer_left_half_way_makes_room_for_the_next(model):
    cache = model.cache()
    first = model.stream(TOKENS[:20], max_tokens=12, activations="exact", cache=cache)
    next(first)
    second = model.generate(TOKENS, max_tokens=12, activations="exact", cache=cache)
    list(second)
    assert second.reused_tokens == 20
    assert second.tokens == alone(model, TOKENS)
    list(first)  # and even then, the first can go on
    assert first.tokens == alone(model, TOKENS[:20])


@pytest.mark.promise("threads", "matmuls, generation (even on one KV cache) and chat templates are thread-safe")
def test_answers_of_several_threads_on_one_cache_are_what_they_are_alone(model):
    cache, prompts = model.cache(), [TOKENS[i : i + 12] for i in range(6)]

    def answer(prompt: list[int]) -> list[int]:
        going = model.stream(prompt, max_tokens=12, activations="exact", cache=cache)
        list(going)
        return going.tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(answer, prompts))
    assert together == [alone(model, prompt) for prompt in prompts]
    assert holds(model, cache, cache.tokens)


def test_a_step_holds_the_lock_of_its_caches(model, monkeypatch):
    """No other thread gets at a cache between the look at its tokens and the new ones."""
    cache, other, seen = model.cache(), model.cache(), []
    pool = ThreadPoolExecutor(1)

    class Watching(Failing):
        def run(self, *arguments):
            for held in (cache, other):
                seen.append(pool.submit(held.lock.acquire, False).result())

    monkeypatch.setattr(model.decoder, "_native", Watching(model.decoder._native, KeyboardInterrupt))
    model.decoder.run([(other, [5]), (cache, [5])], "exact")
    pool.shutdown()
    assert seen == [False, False]


def test_one_text_cannot_come_twice_in_a_batch(model):
    cache = model.cache()
    with pytest.raises(bf.ModelError, match=r"passages share a cache"):
        model.decoder.run([(cache, [5]), (cache, [6])], "exact")
    assert cache.tokens == []


# ---- whose cache it is ----------------------------------------------------------------------------------------------


@pytest.mark.promise("inputs", "invalid text, token ids and KV caches of other models are refused")
@pytest.mark.parametrize(
    "other", [Small(layers=1), Small(kv_heads=1), Small(head_size=16), Small(context=4 * CpuDecoder.chunk)]
)
def test_the_cache_of_another_model_is_refused(model, tmp_path, other):
    """Of other sizes, or of the same: then its keys would only be wrong."""
    write_model(tmp_path / "other.gguf", other)
    cache = load(tmp_path / "other.gguf").cache()
    other = r"the cache belongs to another model \(small llama\)"
    with pytest.raises(bf.ModelError, match=rf"llm.generate: {other}"):
        model.generate([5], cache=cache)
    with pytest.raises(bf.ModelError, match=rf"llm.run: {other}"):
        model.decoder.run([(model.cache(), [5]), (cache, [5])], "exact")


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: cache.copy()])
def test_a_copy_goes_its_own_way(model, copied):
    cache = model.cache()
    model.decoder.run([(cache, TOKENS[:10])], "exact")
    other = copied(cache)
    rows = [model.decoder.run([(c, [token])], "exact") for c, token in ((cache, 7), (other, 8), (cache, 9), (other, 9))]
    assert (cache.tokens, other.tokens) == ([*TOKENS[:10], 7, 9], [*TOKENS[:10], 8, 9])
    assert holds(model, cache, cache.tokens)
    assert holds(model, other, other.tokens)
    assert not np.array_equal(rows[2], rows[3])


def test_shared_beginnings():
    assert shared_length([], [1]) == shared_length([2], [1]) == 0
    assert shared_length([1, 2], [1, 2]) == shared_length([1, 2, 3], [1, 2]) == shared_length([1, 2], [1, 2, 3]) == 2
    assert shared_length([1, 2, 3], [1, 5, 3]) == 1


def test_what_a_cache_holds_is_not_fed_again(model):
    cache = model.cache()
    best = [int(scores.argmax()) for scores in model.logits(TOKENS)]
    assert next_token(model, cache, TOKENS) == (best[-1], 0)
    assert cache.tokens == TOKENS
    assert next_token(model, cache, TOKENS) == (best[-1], len(TOKENS) - 1)
    assert holds(model, cache, TOKENS)
    other = TOKENS[:3] + TOKENS[5:]
    assert next_token(model, cache, other) == (int(model.logits(other)[-1].argmax()), 3)
    assert holds(model, cache, other)


@pytest.mark.parametrize(
    "hidden", [np.ones((2, 63), np.float32), np.ones(64, np.float32), np.ones((2, 64)), [[1.0] * 64]]
)
def test_hidden_states_of_other_sizes_are_refused(model, hidden):
    with pytest.raises(bf.ShapeError, match=r"llm\.logits.*hidden.*.*float32 \[m, 64\]"):
        model.decoder.logits(hidden, "exact")


@pytest.mark.parametrize("capacity", [-1, 2**40, 0.5])
def test_capacities_that_no_cache_has_are_refused(model, capacity):
    with pytest.raises(bf.DataError, match=r"llm\.Cache: capacity"):
        model.decoder.cache(capacity)
