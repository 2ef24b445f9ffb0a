"""Models with recurrent layers on a GPU, or on a fake one: checkpoints, steps ahead, interruptions."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cases import first
from cuda_numpy import NumpyGpu
from draft_matrix import Oracle
from llm_architectures import RECURRENT, write_model, write_mtp_model

from billfish.backends import BACKENDS
from billfish.backends.cuda.driver import device
from billfish.core.errors import BackendUnavailable, ModelError
from billfish.llm import cuda_states, load
from billfish.llm.cuda_states import SequenceStates, StatePool
from billfish.llm.drafting.drafter import Controller
from billfish.llm.kv_cache import HiddenStates
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request

KINDS = ("qwen35", "lfm2", "granitehybrid")  # a delta net, a convolution, Mamba
ONE_OF_EACH = pytest.mark.parametrize("name", KINDS)
TEXT = [3 + (11 * i * i + 5 * i) % 64 for i in range(300)]


def on(name: str) -> pytest.MarkDecorator:
    """One kind of model; the others are `full`: states are copied as bytes, whatever they hold, and
    `test_drafted_answers_are_the_plain_ones` has every kind."""
    return pytest.mark.parametrize("name", first(1, [name, *(other for other in KINDS if other != name)]))


class NoMemory(int):
    name = "CUDA_ERROR_OUT_OF_MEMORY"


def has_gpu() -> bool:
    try:
        device()
    except BackendUnavailable:
        return False
    return True


@pytest.fixture
def gpu(monkeypatch, request):
    """None where there is a real one."""
    if has_gpu():
        yield None
        return
    fake = NumpyGpu(monkeypatch)
    yield fake
    request.node.funcargs.clear()  # pytest's own references
    gc.collect()
    assert not fake.live
    monkeypatch.undo()
    fake.forget()


@pytest.fixture
def model(gpu, name, tmp_path):
    write_model(tmp_path, name, max_position_embeddings=512)
    made = load(tmp_path, device="cuda")
    made.decoder.chunk = 64
    return made


@pytest.fixture
def model_of_qwen35(gpu, tmp_path):
    write_model(tmp_path, "qwen35", max_position_embeddings=512)
    return load(tmp_path, device="cuda")


def next_token(model, text: list[int]) -> int:
    """By a cache of its own."""
    return model.decoder.go_on(model.cache(), text, Sampling().sampler(), None)[0]


def logits(model, cache, tokens: list[int]) -> np.ndarray:
    return model.decoder.logits(model.decoder.run([(cache, tokens)], None)[-1:], None)[0]


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b))


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu(), reason="test_cuda_models.py has it on a fake GPU")
@pytest.mark.parametrize("name", RECURRENT)
def test_logits_are_the_cpus(name, tmp_path):
    """A prompt whole and in pieces, then token by token."""
    write_model(tmp_path, name, max_position_embeddings=512)
    expected = load(tmp_path, device="cpu").logits(TEXT, activations="exact")
    model, cache = load(tmp_path, device="cuda"), None

    def check(made: np.ndarray, wanted: np.ndarray) -> None:
        errors = np.linalg.norm(made - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        assert np.median(errors) < 1e-2, errors  # of an expert's router, a score may tie with another

    check(model.logits(TEXT), expected)
    cache, made = model.cache(), []
    for start, end in ((0, 70), (70, 199), (199, 200), (200, 201), (201, 290)):
        made.append(model.decoder.logits(model.decoder.run([(cache, TEXT[start:end])], None), None))
    check(np.concatenate(made), expected[:290])
    sampler = Sampling().sampler()
    for i in range(290, 299):
        [token] = model.decoder.choose([(cache, [TEXT[i]])], [sampler], None)
        assert expected[i][token] >= expected[i].max() - 0.1 * expected[i].std()


@on("qwen35")
def test_a_prompt_with_a_known_beginning_goes_on_from_a_checkpoint(model, name):
    cache, sampler = model.cache(), Sampling().sampler()
    model.decoder.go_on(cache, TEXT[:150], sampler, None)
    other = [*TEXT[:140], 7, 8, 9]
    token, there = model.decoder.go_on(cache, other, sampler, None)
    assert there == 128
    assert token == next_token(model, other)
    assert cache.tokens == other
    assert cache.rollback(63) == 0
    assert model.decoder.go_on(cache, TEXT[:70], sampler, None) == (next_token(model, TEXT[:70]), 0)


@on("lfm2")
def test_a_copy_begins_at_a_checkpoint_or_where_the_other_is(model, name):
    cache = model.cache()
    logits(model, cache, TEXT[:100])
    copied, begun = cache.copy(), model.cache()
    begun.begin_as(cache, cache.restorable(99))
    assert (len(copied.tokens), len(begun.tokens)) == (100, 64)
    expected = logits(model, cache, [5])
    assert close(logits(model, copied, [5]), expected)
    assert close(logits(model, begun, [*TEXT[64:100], 5]), expected)


@on("granitehybrid")
def test_a_step_ahead_that_nobody_asks_for_is_undone(model, name):
    """Each token that is fed is another than the one that was chosen, so every step ahead was wrong."""
    cache, sampler, text = model.cache(), Sampling().sampler(), TEXT[:61]
    model.decoder.go_on(cache, text, sampler, None)
    for i in range(4):  # across a checkpoint
        fed = TEXT[200 + i]
        model.decoder.choose([(cache, [fed])], [sampler], None)
        text = [*text, fed]
    fresh = model.cache()
    expected = logits(model, fresh, [*text, 9])
    assert cache.tokens == text
    assert cache.restorable(len(text)) == len(text)
    assert close(logits(model, cache, [9]), expected)


@on("lfm2")
def test_answers_alone_and_in_turns_are_the_same(model, name):
    """Steps ahead are taken when one answer is alone, and not when two take turns with one cache. What is fed again
    has other last digits, so that near ties may end either way."""
    prompts = [TEXT[:10], TEXT[5:16]]
    alone = [model.generate(prompt, max_tokens=12) for prompt in prompts]
    shared = model.cache()
    turns = [model.stream(prompt, max_tokens=12, cache=shared) for prompt in prompts]
    for _ in range(13):
        for answer in turns:
            next(answer, "")
    for prompt, *answers in zip(prompts, alone, turns, strict=True):
        for answer in answers:
            assert answer.finish_reason is not None
            rows = model.logits([*prompt, *answer.tokens])[len(prompt) - 1 : -1]
            for row, token in zip(rows, answer.tokens, strict=True):
                assert row[token] >= row.max() - 0.05 * row.std()


@pytest.mark.parametrize("name", ["qwen35"])
def test_an_interrupted_step_goes_on_from_a_checkpoint(gpu, model, name):
    if gpu is None:
        pytest.skip("a real GPU is not interrupted")
    cache, sampler = model.cache(), Sampling().sampler()
    model.decoder.go_on(cache, TEXT[:80], sampler, None)

    def interrupted(*_):
        raise KeyboardInterrupt

    gpu.recurrence = interrupted
    with pytest.raises(KeyboardInterrupt):
        model.decoder.choose([(cache, [5])], [sampler], None)
    del gpu.recurrence
    assert cache.tokens == TEXT[:80]
    with pytest.raises(ModelError, match="recurrent state"):
        model.decoder.choose([(cache, [5])], [sampler], None)
    assert model.decoder.go_on(cache, [*TEXT[:80], 5], sampler, None) == (next_token(model, [*TEXT[:80], 5]), 64)


# ---- drafts ----------------------------------------------------------------------------------------------------------


def draft_always(monkeypatch, texts: list[list[int]]) -> None:
    """By what is known of these texts, with wrong tokens among the right ones."""
    monkeypatch.setattr(Controller, "length", lambda self, kind=0, others=0: self.most)
    monkeypatch.setattr("billfish.llm.model.NgramDrafter", lambda: Oracle(texts))
    monkeypatch.setattr(BACKENDS["cuda"], "batch_invariant", True)


@ONE_OF_EACH
def test_drafted_answers_are_the_plain_ones(model, name, monkeypatch):
    """Across checkpoints, of which those behind accepted tokens stay; then the conversation goes on."""
    monkeypatch.setattr(BACKENDS["cuda"], "batch_invariant", True)
    prompts, sampled = [TEXT[:60], TEXT[3:120], TEXT[:5]], {"temperature": 1.0, "seed": 3}
    for how in ({}, sampled):
        plain = [model.generate(prompt, max_tokens=12, **how).tokens for prompt in prompts]
        draft_always(monkeypatch, [a + b for a, b in zip(prompts, plain, strict=True)])
        for prompt, expected in zip(prompts, plain, strict=True):
            cache = model.cache()
            drafted = model.generate(prompt, max_tokens=12, draft="ngram", cache=cache, **how)
            assert drafted.tokens == expected
            assert drafted.drafts.drafted > drafted.drafts.accepted > 0
            assert cache.restorable(len(cache.tokens)) == len(cache.tokens) == len(prompt) + 11
            fresh = model.cache()
            assert close(logits(model, cache, [9]), logits(model, fresh, [*prompt, *expected[:-1], 9]))
    assert model.decoder._pool.states.drafted == 0


@on("granitehybrid")
def test_a_checkpoint_behind_drafted_tokens(model, name, monkeypatch):
    monkeypatch.setattr(BACKENDS["cuda"], "batch_invariant", True)
    cache, samplers = model.cache(), [Sampling().sampler()]
    expected = model.generate(TEXT[:62], max_tokens=8).tokens
    token, _ = model.decoder.go_on(cache, TEXT[:62], samplers[0], None)
    [choices] = model.decoder.verify([(cache, [token])], samplers, [[*expected[1:5], 0]], None)
    assert [token, *(choice.token for choice in choices)] == expected[:6]
    assert cache.tokens == [*TEXT[:62], *expected[:5]]
    assert (cache.restorable(67), cache.restorable(66)) == (67, 64)
    other, fresh = model.cache(), model.cache()
    other.begin_as(cache, 64)
    assert close(logits(model, other, [9]), logits(model, fresh, [*TEXT[:62], *expected[:2], 9]))


def test_a_batch_is_drafted(model_of_qwen35, monkeypatch):
    model = model_of_qwen35
    monkeypatch.setattr(BACKENDS["cuda"], "batch_invariant", True)
    prompts = [TEXT[i : i + 5 + 9 * i] for i in range(5)]
    plain = [model.generate(prompt, max_tokens=8).tokens for prompt in prompts]
    draft_always(monkeypatch, [a + b for a, b in zip(prompts, plain, strict=True)])
    with Engine(model, streams=3, context=128, draft="ngram") as engine:
        found: list[list[int]] = [[] for _ in prompts]
        for prompt, tokens in zip(prompts, found, strict=True):
            engine.submit(Request(prompt, 8), lambda chosen, to=tokens: to.append(chosen.token))
        engine.close()
        assert engine.counts().accepted_tokens > 0
    assert found == plain


def test_without_memory_nothing_is_drafted(model_of_qwen35, monkeypatch):
    model = model_of_qwen35
    plain = model.generate(TEXT[:20], max_tokens=8).tokens
    draft_always(monkeypatch, [TEXT[:20] + plain])
    model.decoder._pool.states.most_checkpoints = 0
    drafted = model.generate(TEXT[:20], max_tokens=8, draft="ngram")
    assert drafted.tokens == plain
    assert drafted.drafts.drafted == 0
    with Engine(model, streams=1, context=128, draft="ngram") as engine:
        engine.submit(Request(TEXT[:20], 8), lambda chosen: None)
        engine.close()
        assert (engine.counts().drafts, engine.counts().drafted_tokens) == (0, 0)


def test_a_drafted_step_that_fails_keeps_no_memory(model_of_qwen35, monkeypatch):
    model, samplers = model_of_qwen35, [Sampling().sampler()]
    cache, pool = model.cache(), model.decoder._pool.states
    token, _ = model.decoder.go_on(cache, TEXT[:20], samplers[0], None)

    def fail(*_):
        raise KeyboardInterrupt

    for where in ("_pieces", "_known"):
        with monkeypatch.context() as patched:
            patched.setattr(model.decoder, where, fail)
            with pytest.raises(KeyboardInterrupt):
                model.decoder.verify([(cache, [token])], samplers, [[5, 6, 7]], None)
        assert pool.drafted == 0
    with monkeypatch.context() as patched:
        taken = pool.take

        def take():
            if pool.drafted == 2:
                raise KeyboardInterrupt
            return taken()

        patched.setattr(pool, "take", take)
        with pytest.raises(KeyboardInterrupt):
            model.decoder.verify([(cache, [token])], samplers, [[5, 6, 7]], None)
    assert pool.drafted == 0
    fresh = next_token(model, [*TEXT[:20], token])
    assert model.decoder.choose([(cache, [token])], samplers, None) == [fresh]


def test_a_sequence_begins_again_behind_drafts_that_nobody_asked_for(model_of_qwen35):
    model, samplers = model_of_qwen35, [Sampling().sampler()]
    cache = model.cache()
    token, _ = model.decoder.go_on(cache, TEXT[:20], samplers[0], None)
    model.decoder.submit([(cache, [token])], samplers, None, [[5, 6, 7]])
    cache.rollback(0)
    text = TEXT[:30]
    for _ in range(3):
        expected = next_token(model, text)
        assert model.decoder.go_on(cache, text, samplers[0], None)[0] == expected
        text = [*text, expected]
    assert model.decoder._pool.states.drafted == 0


# ---- MTP blocks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    write_mtp_model(tmp_path)
    return tmp_path


@pytest.fixture
def mtp_model(gpu, folder, monkeypatch):
    monkeypatch.setattr(Controller, "length", lambda self, kind=0, others=0: self.most)
    monkeypatch.setattr(BACKENDS["cuda"], "batch_invariant", True)
    return load(folder, device="cuda")


def test_an_mtp_block_gives_what_it_gives_on_the_cpu(mtp_model, folder):
    """In steps of any length, also where pages of the KV cache begin in them."""
    there, here = mtp_model.decoder.mtp, load(folder, device="cpu").decoder.mtp
    assert mtp_model.decoder.nbytes > there.nbytes > 0
    there._chunk = 50
    text, hidden = TEXT[:130], np.random.default_rng(1).standard_normal((130, 64)).astype(np.float32)
    assert close(there.normalize_model(hidden), here.normalize_model(hidden))
    cache, other = there.cache(), here.cache()
    for start, end in ((0, 1), (1, 100), (100, 130)):
        ours = there.run(cache, text[start:end], hidden[start:end])
        theirs = here.run(other, text[start:end], hidden[start:end])
        assert close(ours, theirs)
        assert close(there.normalize(ours), here.normalize(theirs))
        assert close(there.logits(ours), here.logits(theirs))
    assert cache.tokens == text
    assert (cache.rollback(70), other.rollback(70)) == (70, 70)
    assert close(there.run(cache, [5, 6], hidden[:2]), here.run(other, [5, 6], hidden[:2]))


def test_steps_keep_hidden_states_where_somebody_wants_them(mtp_model):
    """Of prompts and of answers, in steps with others, drafted and launched ahead."""
    decoder, prompt = mtp_model.decoder, TEXT[:100]
    decoder.chunk = 64
    cache = mtp_model.cache()
    answer = mtp_model.generate(prompt, max_tokens=9, draft="mtp", draft_length=3, cache=cache)
    text = [*prompt, *answer.tokens[:-1]]
    assert close(cache.hidden.of(0, len(text)), decoder.run([(mtp_model.cache(), text)], None))
    alone, other = mtp_model.cache(), mtp_model.cache()
    alone.hidden = HiddenStates(64)
    samplers = [Sampling().sampler(), Sampling(repetition_penalty=1.1).sampler(TEXT[:3])]
    decoder.choose([(alone, TEXT[:30]), (other, TEXT[:3])], samplers, None)
    for token in (5, 6):
        decoder.choose([(other, [7]), (alone, [token])], samplers[::-1], None)
    for _ in range(3):
        [token] = decoder.choose([(alone, [token])], samplers[:1], None)
    assert other.hidden is None
    assert close(alone.hidden.of(0, 35), decoder.run([(mtp_model.cache(), alone.tokens)], None))


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}])
def test_answers_with_an_mtp_block_are_the_plain_ones(mtp_model, how):
    for prompt in (TEXT[:1], TEXT[3:120]):
        plain = mtp_model.generate(prompt, max_tokens=14, **how)
        drafted = mtp_model.generate(prompt, max_tokens=14, draft="mtp", draft_length=3, **how)
        assert drafted.tokens == plain.tokens
        assert drafted.drafts.drafted > drafted.drafts.steps


def test_a_batch_is_drafted_by_an_mtp_block(mtp_model, monkeypatch):
    """A long prompt is read in pieces."""
    monkeypatch.setattr("billfish.llm.drafting.mtp.PIECE", 30)
    prompts = [TEXT[i : i + 5 + 19 * i] for i in range(5)]
    plain = [mtp_model.generate(prompt, max_tokens=10).tokens for prompt in prompts]
    found: list[list[int]] = [[] for _ in prompts]
    with Engine(mtp_model, streams=3, context=128, draft="mtp", draft_length=3) as engine:
        for prompt, tokens in zip(prompts, found, strict=True):
            engine.submit(Request(prompt, 10), lambda chosen, to=tokens: to.append(chosen.token))
        engine.close()
        assert engine.counts().drafted_tokens > 0
    assert found == plain


def test_a_gpu_without_memory_for_an_mtp_block(gpu, mtp_model, monkeypatch):
    if gpu is None:
        pytest.skip("this machine has a GPU, and it has memory")
    with monkeypatch.context() as patched:
        patched.setattr(gpu, "cuMemAlloc", lambda nbytes: (NoMemory(2), 0))
        with pytest.raises(BackendUnavailable, match=r"memory for the MTP block.*ngram"):
            mtp_model.generate(TEXT[:9], draft="mtp")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class Pool(StatePool):
    """Without a device."""

    def __init__(self, nbytes: int, most: int = 100) -> None:
        self.nbytes, self.most_checkpoints, self.checkpoints, self.taken = nbytes, most, 0, 0
        self.drafted = 0

    def take(self):
        self.taken += 1
        return type("Memory", (), {"pointer": self.taken})()

    def give(self, buffer) -> None:
        self.taken -= 1


class States(SequenceStates):
    """That copies nothing."""

    def _copy(self, to: int, source: int) -> None:
        pass

    def _restore(self, source: SequenceStates, position: int) -> None:
        self.position = position


def test_checkpoints_stay_within_their_budget():
    """As the CPU's: four fit in 256 MiB beside each other, those of message ends and the last position's."""
    pool = Pool(1 << 26)
    states = States(pool)
    for start in range(0, 1280, 64):
        states.prepare(start, 64, [start + 10] if start in (128, 640) else [])
        states.done(start + 64)
    assert len(states.checkpoints) == 4
    assert [states.restorable(n) for n in (100, 200, 649, 700, 1280)] == [0, 138, 138, 650, 1280]
    other = States(pool)
    other.copy(states, 650)
    assert [each.position for each in other.checkpoints] == [138, 650]
    assert pool.taken == 6  # two sequences, and checkpoints that they share
    del states
    gc.collect()
    assert pool.taken == 3


def test_checkpoints_of_all_sequences_stay_within_a_share_of_memory():
    pool = Pool(1000, most=3)
    sequences = [States(pool) for _ in range(3)]
    for states in sequences:
        states.prepare(0, 200)
        states.done(200)
    assert pool.checkpoints == 3
    assert [[each.position for each in states.checkpoints] for states in sequences] == [[64, 128, 192], [], []]
    assert sequences[1].restorable(199) == 0
    assert cuda_states.CHECKPOINT_SHARE > 1


def test_other_tokens_leave_nothing_of_a_step_that_was_launched_ahead():
    states = States(Pool(1000))
    states.prepare(0, 200)
    states.done(200)
    states.keep()
    states.prepare(50, 180)
    states.done(230)
    assert states.restorable(229) == 192
