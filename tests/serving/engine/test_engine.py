"""An engine among many requests: the answers are those of each alone, and nothing is lost or kept."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llm_architectures import write_model as write_model_with_experts
from serving_http import until
from serving_support import Collected, alone, ask, random_sampling, random_tokens, small_model, submit

import billfish as bf
from billfish.llm.sampler import Sampling
from billfish.serving.engine import engine as engine_module
from billfish.serving.engine import kv_slots
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.kv_slots import Cuts, Slots
from billfish.serving.engine.requests import QueueFull, Request, ServerClosing


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bf.llm.Model:
    return small_model(tmp_path_factory.mktemp("serving"))


@pytest.fixture
def engine(model: bf.llm.Model) -> Iterator[Engine]:
    with Engine(model, streams=4, activations="exact") as engine:
        yield engine


def assert_idle(engine: Engine) -> None:
    """All slots are free."""
    counts = engine.counts()
    assert (counts.running, counts.waiting, engine._slots.free) == (0, 0, engine.streams)
    assert 0 <= counts.cache_bytes <= counts.cache_bytes_bound


def held(model: bf.llm.Model, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Each step of the decoder waits for a release."""
    steps, choose = threading.Semaphore(0), model.decoder.choose

    def waiting(*arguments: Any) -> list[int]:
        assert steps.acquire(timeout=60)
        return choose(*arguments)

    monkeypatch.setattr(model.decoder, "choose", waiting)
    return steps


# ---- the same answers as alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_mixed_requests_get_what_each_gets_alone(tmp_path, architecture):
    model, rng = small_model(tmp_path, architecture=architecture), random.Random(1)
    common = random_tokens(rng, 300)
    requests = []
    for _ in range(36):
        own = random_tokens(rng, rng.choice([1, 3, 7, 8, 20, 60, 120]))
        prompt = common[: rng.choice([0, 0, 16, 100, 255, 300])] + own
        requests.append(Request(prompt, rng.randrange(1, 30), random_sampling(rng)))
    with Engine(model, streams=9, activations="exact") as engine:
        answers = [submit(engine, request) for request in requests]
        for answer in answers:
            answer.wait()
        assert engine.counts().cached_tokens > 500
        assert_idle(engine)
    for request, answer in zip(requests, answers, strict=True):
        assert (answer.text, answer.ids, answer.finished) == alone(model, request, activations="exact")
        assert answer.ticket.prompt_tokens == len(request.prompt)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "granitehybrid"])
def test_recurrent_states_give_the_answers_of_each_alone(tmp_path, name):
    """Prompts share beginnings, and go on behind checkpoints: every 64 tokens, and where messages end."""
    write_model_with_experts(tmp_path, name, max_position_embeddings=1024)
    model, rng = bf.llm.load(tmp_path, device="cpu"), random.Random(1)
    end, common = min(model.tokenizer.ends), [rng.randrange(4, 64) for _ in range(600)]
    for at in (100, 270, 530):
        common[at] = end
    requests = []
    for length in (600, 600, 280, 105, 0, 600, 320, 540, 600, 300):
        own = [rng.randrange(4, 64) for _ in range(rng.choice([20, 60]))]
        requests.append(Request(common[:length] + own, 6, random_sampling(rng)))
    with Engine(model, streams=3, activations="exact") as engine:
        answers = [submit(engine, request) for request in requests]
        for answer in answers:
            answer.wait()
        assert engine.counts().cached_tokens > 500
        assert_idle(engine)
    for request, answer in zip(requests, answers, strict=True):
        assert (answer.text, answer.ids, answer.finished) == alone(model, request, activations="exact")


def test_smollm2():
    model = bf.llm.load(device="cpu")
    questions = ["What is the capital of France?", "Name a colour.", "Count to five."]
    with Engine(model, streams=2, context=256, activations="exact") as engine:
        requests = [Request(model.encode(question), 6) for question in questions]
        answers = [submit(engine, request) for request in requests]
        texts = [answer.wait().text for answer in answers]
    assert texts == [alone(model, request, activations="exact")[0] for request in requests]


def test_experts_get_the_rows_of_a_prompt_alone(tmp_path, monkeypatch):
    """How many rows an expert gets decides on its kernels: parts are as large as those of a prompt alone."""
    write_model_with_experts(tmp_path / "model", "mixtral")
    model = bf.llm.load(tmp_path / "model", device="cpu", quantize="q8_0")
    monkeypatch.setattr(model.decoder, "chunk", 16)
    rng = random.Random(2)
    start = [rng.randrange(model.config.vocabulary) for _ in range(40)]
    requests = [Request([*start[: 6 * i], 3, i], 8, Sampling(1.0, seed=i)) for i in range(8)]
    with Engine(model, streams=3, activations="exact") as engine:
        answers = [submit(engine, request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert answer.wait().ids == alone(model, request, activations="exact")[1]
        assert engine.counts().cached_tokens > 0


def test_the_context_ends_an_answer(model):
    with Engine(model, streams=1, context=40, activations="exact") as engine:
        request = Request([5] * 30, 100, Sampling(logit_bias={1: -100.0}))
        answer = ask(engine, request)
        assert (answer.finished, answer.ticket.completion_tokens) == ("length", 11)
        whole = alone(model, Request([5] * 30, 11, request.sampling), activations="exact")
        assert answer.text == whole[0]
        with pytest.raises(bf.ModelError, match=r"41 tokens.*40"):
            engine.submit(Request([5] * 41, 1), print)


def test_what_a_text_has_the_mean_of(engine, model):
    tokens = random_tokens(random.Random(3), 261)
    texts = [tokens, tokens[:5], tokens]
    for text, vector in zip(texts, engine.embed(texts).result(60), strict=True):
        np.testing.assert_array_equal(vector, model.pool(model.hidden(text)))
    assert_idle(engine)
    assert engine.counts().cache_bytes == 0


# ---- how prompts are read -------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_stop_the_others(model, monkeypatch):
    steps, fed = held(model, monkeypatch), list[list[int]]()
    run = model.decoder.run
    monkeypatch.setattr(
        model.decoder, "run", lambda passages, how: fed.append([len(t) for _, t in passages]) or run(passages, how)
    )
    rng = random.Random(4)
    with Engine(model, streams=4) as engine:
        first = submit(engine, Request(random_tokens(rng, 20), 40, Sampling(logit_bias={1: -100.0})))
        steps.release()
        while not first.pieces:
            time.sleep(0.001)
        long = submit(engine, Request(random_tokens(rng, 400), 2, Sampling(logit_bias={1: -100.0})))
        short = submit(engine, Request(random_tokens(rng, 20), 2, Sampling(logit_bias={1: -100.0})))
        steps.release(1000)
        for answer in (first, long, short):
            answer.wait()
    beside = fed[1:]
    assert all(sum(lengths) <= 64 + 16 + 2 for lengths in beside)
    assert all(1 in lengths for lengths in beside[:20]), "the first answer got a token in each step"
    assert any(len(lengths) == 3 for lengths in beside), "the end of the long prompt and the short one in one pass"


def test_texts_take_one_pass_of_each_step_beside_an_answer(model, monkeypatch):
    """Of several texts as many as get the vectors that each has alone, and the first one is always among them."""
    steps, passes, run = held(model, monkeypatch), [[]], model.decoder.run
    rng = random.Random(7)
    texts = [random_tokens(rng, count) for count in (3, 20, 4, 12, 5, 30)]
    expected = [model.pool(model.hidden(text)) for text in texts]

    def noted(passages: Any, how: Any) -> Any:
        if how != "exact":  # as answers do
            passes.append([])
        else:
            passes[-1].append([len(tokens) for _, tokens in passages])
        return run(passages, how)

    monkeypatch.setattr(model.decoder, "run", noted)
    with Engine(model, streams=8, activations="q16") as engine:
        answer = submit(engine, Request([8, 9], 10, ENDLESS))
        steps.release()
        until(lambda: bool(answer.pieces))
        vectors = [engine.embed([text]) for text in texts]
        steps.release(1000)
        for vector, wanted in zip(vectors, expected, strict=True):
            np.testing.assert_array_equal(vector.result(60)[0], wanted)
        answer.wait()
    found = [each for each in passes if each]
    assert all(len(each) == 1 for each in found), "one pass in a step"
    assert [each[0] for each in found] == [[3, 4], [20, 12, 30], [5]]


def test_a_prompt_is_scored_as_it_is_read(model, monkeypatch):
    """The logits of all its tokens at once would keep answers waiting."""
    steps, scored, logits = held(model, monkeypatch), [], model.decoder.logits
    prompt = random_tokens(random.Random(8), 400)

    def noted(hidden: Any, how: Any) -> Any:
        if how == "exact":
            scored.append((answer.ticket.completion_tokens, len(hidden)))
        return logits(hidden, how)

    monkeypatch.setattr(model.decoder, "logits", noted)
    with Engine(model, streams=2, activations="q16") as engine:
        answer = submit(engine, Request([8, 9], 40, ENDLESS))
        steps.release()
        until(lambda: bool(answer.pieces))
        scores = engine.score([prompt], 0)
        steps.release(1000)
        found = [logprob for ((_, logprob),) in scores.result(60)[0]]
        answer.wait()
    of_step = [sum(count for step, count in scored if step == each) for each in {step for step, _ in scored}]
    assert sum(of_step) == 399
    assert max(of_step) <= 64 + 16
    rows = model.logits(prompt, activations="exact").astype(np.float64)
    logs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(found, [logs[i, token] for i, token in enumerate(prompt[1:])], atol=1e-4)


def test_prompts_are_read_in_the_order_in_which_they_come(model, monkeypatch):
    steps, ends, rng = held(model, monkeypatch), list[int](), random.Random(12)
    with Engine(model, streams=8) as engine:
        with engine._changed:  # all are there when the first begins
            for number in range(8):
                request = Request(random_tokens(rng, rng.choice([30, 100, 300])), 1, ENDLESS)
                engine.submit(request, lambda piece, number=number: ends.append(number))
        steps.release(1000)
    assert ends == [*range(8)]


def test_many_requests_begin_in_a_moment(model, monkeypatch):
    """256 at once, with and without a common beginning: few hashes, and no text is compared with another."""
    rng, count = random.Random(13), 256
    common = random_tokens(rng, 200)
    prompts = [[*common[: 200 * (i % 2)], *random_tokens(rng, 100)] for i in range(count)]
    slots = Slots(model.decoder, count, 320, Cuts(256, 16), exact=False)
    hashed, compared = kv_slots.block_hashes, list[int]()
    monkeypatch.setattr(type(model.decoder.cache()), "restorable", lambda cache, n: compared.append(n) or n)
    digests = list[int]()
    monkeypatch.setattr(kv_slots, "block_hashes", lambda *how: digests.append(len(how[0]) // 16) or hashed(*how))
    taken = []
    for prompt in prompts:
        slots.note_growth()
        slot = slots.take(prompt, slots.hashes(prompt))
        slot.cache.tokens += prompt[len(slot.cache.tokens) :]
        taken.append(slot)
    assert sum(digests) <= 2 * sum(len(prompt) // 16 for prompt in prompts)
    assert len(compared) <= 4 * count
    assert len({id(slot) for slot in taken}) == count


def test_prompts_share_what_is_cached(engine, model):
    rng = random.Random(5)
    start = random_tokens(rng, 100)
    first = ask(engine, Request([*start, *random_tokens(rng, 50)], 2))
    other = ask(engine, Request([*start, *random_tokens(rng, 50)], 2))
    again = ask(engine, Request(start, 2))
    assert [each.ticket.cached_tokens for each in (first, other, again)] == [0, 96, 80]
    assert engine.counts().cached_tokens == 176
    assert engine.counts().prompt_tokens == 400


def test_a_conversation_goes_on_behind_its_answer(model):
    """But for exact activations: an answer's tokens were not read as a prompt is."""
    for activations, cached in (("q16", 48), ("exact", 32)):
        with Engine(model, streams=2, activations=activations) as engine:
            start = random_tokens(random.Random(6), 40)
            answer = ask(engine, Request(start, 20, Sampling(logit_bias={1: -100.0})))
            more = ask(engine, Request([*start, *answer.ids, *[9] * 30], 1))
            assert more.ticket.cached_tokens == cached


def test_requests_for_one_prompt_read_it_once(model):
    prompt = random_tokens(random.Random(7), 200)
    with Engine(model, streams=4, activations="exact") as engine:
        with engine._changed:  # all four are there when the first begins
            answers = [submit(engine, Request(prompt, 4, Sampling(1.0, seed=seed))) for seed in range(4)]
        for seed, answer in enumerate(answers):
            request = Request(prompt, 4, Sampling(1.0, seed=seed))
            assert answer.wait().text == alone(model, request, activations="exact")[0]
    assert [answer.ticket.cached_tokens for answer in answers] == [0, 176, 176, 176]


def test_requests_that_wait_for_a_prompt_let_others_pass(model, monkeypatch):
    """Seven answers to one long prompt wait until it is read. A short one behind them begins at once."""
    steps, rng = held(model, monkeypatch), random.Random(9)
    long = random_tokens(rng, 400)
    with Engine(model, streams=4) as engine:
        with engine._changed:  # all are there when the first begins
            answers = [submit(engine, Request(long, 2, Sampling(1.0, seed=seed))) for seed in range(7)]
            short = submit(engine, Request(random_tokens(rng, 5), 2, ENDLESS))
        steps.release(2)  # 240 tokens of the long prompt, then 160 and the short one
        while not short.pieces:
            time.sleep(0.001)
        assert [len(answer.pieces) for answer in answers] == [1] + [0] * 6
        steps.release(1000)
        assert {answer.wait().finished for answer in answers} <= {"stop", "length"}
    assert [answer.ticket.cached_tokens for answer in answers] == [0] + [384] * 6


def test_many_texts_have_one_place(model, monkeypatch):
    """The queue is full when they are half done: none of their vectors is lost, and others get their turn."""
    order, pool = [], model.pool
    monkeypatch.setattr(model, "pool", lambda hidden: order.append(len(hidden)) or pool(hidden))
    steps = held(model, monkeypatch)
    with Engine(model, streams=1, queue=2) as engine:
        with engine._changed:
            vectors = engine.embed([[5] * 3, [6] * 4, [7] * 5])
            answer = submit(engine, Request([8, 9], 1, ENDLESS))
            other = engine.embed([[5] * 9])
        with pytest.raises(QueueFull):
            engine.embed([[5]])
        steps.release(1000)
        assert [len(vector) for vector in vectors.result(60)] == [model.config.hidden] * 3
        other.result(60)
        assert answer.wait().finished == "length"
    assert order == [3, 9, 4, 5]
    assert engine.counts().prompt_tokens == 3 + 4 + 5 + 9 + 2


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_at_once(model, monkeypatch):
    steps = held(model, monkeypatch)
    with Engine(model, streams=2, queue=3) as engine:
        answers = [submit(engine, Request([5, 6], 2)) for _ in range(5)]
        with pytest.raises(QueueFull, match=r"queue is full .3 requests"):
            engine.submit(Request([5, 6], 2), print)
        steps.release(1000)
        assert {answer.wait().finished for answer in answers} <= {"stop", "length"}
        assert ask(engine, Request([5, 6], 2)).pieces
        assert engine.counts().refused == 1


def test_memory_is_set_aside_at_the_start(model):
    config = model.config
    with Engine(model, streams=3, context=128) as engine:
        positions = sum(2 * 4 * block.mixer.kv_heads * block.mixer.head_size for block in config.blocks)
        assert engine.counts().cache_bytes_bound == 3 * 128 * positions
        rng = random.Random(8)
        caches = [slot.cache for slot in engine._slots._slots]
        for answer in [submit(engine, Request(random_tokens(rng, rng.randrange(1, 128)), 200)) for _ in range(30)]:
            answer.wait()
            assert sum(cache.nbytes for cache in caches) == engine.counts().cache_bytes_bound
            assert engine.counts().cache_bytes <= engine.counts().cache_bytes_bound


def test_streams_that_memory_has_no_room_for(model, monkeypatch):
    def full(capacity: int) -> None:
        raise MemoryError

    monkeypatch.setattr(model.decoder, "cache", full)
    with pytest.raises(bf.DataError, match=r"3 streams of 128 tokens.*--streams or --context"):
        Engine(model, streams=3, context=128)


def test_streams_that_a_gpu_has_no_room_for(model, monkeypatch):
    def full(capacity: int) -> None:
        raise bf.ModelError("llm.generate: the KV cache needs 9 GB, and 1 GB is free.")

    monkeypatch.setattr(model.decoder, "cache", full)
    with pytest.raises(bf.DataError, match=r"streams.*9 GB.*--streams or --context") as caught:
        Engine(model, streams=3, context=128)
    assert "llm.generate" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"streams": 0}, r"streams.*0.*1 or more"),
        ({"context": 513}, r"context.*513.*1 to 512"),
        ({"queue": -1}, r"queue.*-1"),
        ({"activations": "q3"}, "activations"),
    ],
)
def test_engines_that_cannot_be(model, how, message):
    with pytest.raises(bf.BillfishError, match=message):
        Engine(model, **how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens.*0.*1 or more"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": 21}, r"logprobs.*21.*None, or 0 to 20"),
    ],
)
def test_requests_that_cannot_be(how, message):
    with pytest.raises(bf.DataError, match=message):
        Request(**{"prompt": [5], "max_tokens": 1, **how})


def test_tokens_that_the_model_does_not_have(engine):
    for request in (Request([261], 1), Request([5], 1, Sampling(logit_bias={261: 1.0}))):
        with pytest.raises(bf.ModelError, match=r"token 261.*tokens from 0 to 260"):
            engine.submit(request, print)
    with pytest.raises(bf.ModelError, match="at least one"):
        engine.submit(Request([], 1), print)


# ---- ends -----------------------------------------------------------------------------------------------------------

ENDLESS = Sampling(logit_bias={1: -100.0})


def test_who_goes_is_cancelled_at_the_next_step(engine, model, monkeypatch):
    steps = held(model, monkeypatch)
    running, gone = (submit(engine, Request([token] * 20, 60, ENDLESS)) for token in (5, 6))
    waiting = [submit(engine, Request([7] * 20, 60, ENDLESS)) for _ in range(4)]
    steps.release(3)
    while len(gone.pieces) < 1:
        time.sleep(0.001)
    for answer in (gone, waiting[-1]):
        answer.ticket.cancel()
    steps.release(1000)
    assert gone.wait().finished == waiting[-1].wait().finished == "cancelled"
    assert gone.ticket.completion_tokens <= 4
    assert {answer.wait().finished for answer in (running, *waiting[:-1])} == {"length"}
    gone.ticket.cancel()
    assert engine.counts().finished == {"stop": 0, "length": 4, "cancelled": 2, "failed": 0, "refused": 0}


def test_who_does_not_take_a_piece_is_cancelled(engine):
    def refuse(piece: object) -> None:
        raise OSError("gone")

    engine.submit(Request([5, 6], 400, ENDLESS), refuse)
    other = submit(engine, Request([6, 7], 30, ENDLESS))
    assert other.wait().finished == "length"
    engine.close()
    assert engine.counts().finished["cancelled"] == 1
    assert_idle(engine)


def test_a_step_that_fails_ends_its_requests_alone(engine, model, monkeypatch):
    choose = model.decoder.choose

    def failing(passages: Any, *arguments: Any) -> list[int]:
        if any(66 in tokens for _, tokens in passages):
            raise MemoryError("no room")
        return choose(passages, *arguments)

    monkeypatch.setattr(model.decoder, "choose", failing)
    failed = ask(engine, Request([66] * 20, 10))
    assert (failed.finished, failed.pieces[-1].error) == ("failed", "MemoryError: no room")
    request = Request([67] * 20, 10)
    assert ask(engine, request).text == alone(model, request, activations="exact")[0]
    engine.close()
    assert_idle(engine)
    assert engine.counts().finished["failed"] == 1


def test_an_answer_that_fails_stops_nobody(engine, model, monkeypatch):
    other = submit(engine, Request([5] * 20, 50, ENDLESS))
    data = model.tokenizer.piece_bytes
    monkeypatch.setattr(model.tokenizer, "piece_bytes", lambda token: data(token) if token != 66 else 1 / 0)
    failed = ask(engine, Request([6, 7], 10, Sampling(logit_bias={66: 100.0})))
    assert (failed.finished, failed.pieces[-1].error) == ("failed", "ZeroDivisionError: division by zero")
    assert other.wait().finished == "length"


def test_an_embedding_that_fails_stops_nobody(engine, model, monkeypatch):
    answer = submit(engine, Request([5] * 20, 50, ENDLESS))
    monkeypatch.setattr(model, "pool", lambda hidden: 1 / 0)
    with pytest.raises(bf.BillfishError, match="ZeroDivisionError"):
        engine.embed([[5, 6, 7]]).result(60)
    assert answer.wait().finished == "length"


def test_what_escapes_a_step_ends_all_requests(model, monkeypatch):
    """A panic inside a library, too, which no `except Exception` takes. The engine goes on."""

    class Panic(BaseException):
        pass

    def panic(*arguments: object) -> None:
        raise Panic("inside")

    with Engine(model, streams=1, activations="exact") as engine:
        for error in (panic, lambda *_: [][1]):
            with monkeypatch.context() as patched:
                patched.setattr(engine_module, "share_out", error)
                with engine._changed:
                    answers = [submit(engine, Request([token] * 20, 10)) for token in (5, 6)]
                    vectors = engine.embed([[5], [6]])
                assert {answer.wait().finished for answer in answers} == {"failed"}
                assert all("inside" in a.pieces[-1].error or "IndexError" in a.pieces[-1].error for a in answers)
                with pytest.raises(bf.BillfishError):
                    vectors.result(60)
        until(lambda: engine.is_alive)
        assert_idle(engine)
        request = Request([67] * 20, 10)
        assert ask(engine, request).text == alone(model, request, activations="exact")[0]
    assert engine.counts().finished["failed"] == 6


def test_closing_finishes_what_runs(model):
    engine = Engine(model, streams=1)
    answers = [submit(engine, Request([token, 9], 10, ENDLESS)) for token in (5, 6, 7)]
    engine.close()
    assert [answer.finished for answer in answers] == ["length"] * 3
    with pytest.raises(ServerClosing, match="closing"):
        engine.submit(Request([5], 1), print)
    engine.close()
    assert_idle(engine)


def test_closing_at_once_cancels_what_runs(model, monkeypatch):
    steps = held(model, monkeypatch)
    engine = Engine(model, streams=1)
    answers = [submit(engine, Request([token, 9], 400, ENDLESS)) for token in (5, 6, 7)]
    vector = engine.embed([[5, 6], [7]])

    def release() -> None:
        while not engine._closing:
            time.sleep(0.001)
        steps.release(1000)

    threading.Thread(target=release).start()
    engine.close(finish=False)
    assert [answer.finished for answer in answers] == ["cancelled"] * 3
    assert vector.cancelled()
    assert_idle(engine)


def test_a_storm(model):
    """Some hundred requests by several threads: each ends once, and all slots are free afterwards."""
    with Engine(model, streams=5, context=128, queue=20, activations="exact") as engine:
        results: list[tuple[Request, Collected]] = []

        def user(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(50):
                prompt = random_tokens(random.Random(rng.randrange(3)), rng.choice([5, 40, 80])) + random_tokens(rng, 5)
                request = Request(prompt, rng.randrange(1, 40), random_sampling(rng), stop=("ab",))
                try:
                    answer = submit(engine, request)
                except QueueFull:
                    continue
                if rng.random() < 0.2:
                    answer.ticket.cancel()
                elif rng.random() < 0.1:
                    engine.embed([prompt, prompt]).cancel()
                if rng.random() < 0.7:
                    answer.wait()
                results.append((request, answer))

        threads = [threading.Thread(target=user, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for _, answer in results:
            answer.wait()
    assert_idle(engine)
    ends = [answer.finished for _, answer in results]
    assert len(ends) > 150
    assert {"stop", "length", "cancelled"} == set(ends)
    assert engine.counts().finished["failed"] == 0
    for request, answer in results[::10]:
        if answer.finished != "cancelled":
            assert answer.text == alone(model, request, activations="exact")[0].split("ab")[0]
