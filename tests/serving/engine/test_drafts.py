"""Drafts in an engine: each answer is the one without them, and the counts tell what they gave."""

from __future__ import annotations

import random
import threading
import urllib.request

import pytest
from llm_architectures import write_model as write_architecture
from llm_models import Small, write_model
from serving_http import events, send, serving
from serving_support import alone, ask, compiled, random_sampling, random_tokens, small_model, submit

import billfish as bf
from billfish.llm.drafting.drafter import MOST_DRAFTED, Controller, Drafter, StepSeconds
from billfish.llm.kv_cache import NoRoom
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.requests import Request

EXACT = {"activations": "exact"}
REPEATING = Sampling(logit_bias={70: 100.0})  # one token all the time, so that n-grams are right


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bf.llm.Model:
    return small_model(tmp_path_factory.mktemp("drafts"))


@pytest.fixture
def always(monkeypatch):
    """As many tokens as there may be are drafted, whether it pays or not."""
    monkeypatch.setattr(Controller, "length", lambda self, kind=0, others=0: 0 if kind is None else self.most)


class Oracle(Drafter):
    """Knows the answers to some prompts, and lies about every fifth token."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts

    def draft(self, sequence, most):
        known = next((text for text in self._texts if text[: len(sequence)] == sequence), sequence)
        drafted = enumerate(known[len(sequence) : len(sequence) + most], len(sequence))
        return [token if at % 5 else 3 + token % 2 for at, token in drafted]


def engine_that_knows(model: bf.llm.Model, requests: list[Request], monkeypatch, **options) -> Engine:
    """The drafts of an engine are right for the most part."""
    texts = []
    for request in requests:
        whole = Request(request.prompt, request.max_tokens + 8, request.sampling)
        texts.append(request.prompt + alone(model, whole, **EXACT)[1])
    monkeypatch.setattr("billfish.llm.model.NgramDrafter", lambda: Oracle(texts))
    return Engine(model, draft="ngram", **{**EXACT, **options})


def mixed_requests(count: int) -> list[Request]:
    rng, requests = random.Random(1), []
    common = random_tokens(rng, 100)
    for _ in range(count):
        own = random_tokens(rng, rng.choice([1, 7, 8, 20, 60]))
        prompt = common[: rng.choice([0, 16, 100])] + own
        requests.append(Request(prompt, rng.randrange(1, 40), random_sampling(rng)))
    return requests


@pytest.mark.parametrize("draft", ["ngram", "model", "oracle"])
def test_mixed_requests_get_what_each_gets_alone(model, draft, always, monkeypatch, tmp_path):
    requests = mixed_requests(24)
    if draft == "oracle":
        engine = engine_that_knows(model, requests, monkeypatch, streams=5)
    else:
        small = model if draft == "ngram" else small_model(tmp_path)
        engine = Engine(model, streams=5, draft="ngram" if draft == "ngram" else small, **EXACT)
    with engine:
        answers = [submit(engine, request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert (answer.wait().text, answer.ids, answer.finished) == alone(model, request, **EXACT)
        counts = engine.counts()
        assert engine._slots.free == 5
    assert counts.generated_tokens == sum(answer.ticket.completion_tokens for answer in answers)
    assert counts.drafted_tokens == sum(answer.ticket.drafts.drafted for answer in answers)
    assert counts.accepted_tokens == sum(answer.ticket.drafts.accepted for answer in answers)
    assert counts.drafted_tokens >= counts.drafts > 0
    if draft != "ngram":
        assert counts.drafted_tokens > counts.accepted_tokens > counts.generated_tokens / 4


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid"])
def test_recurrent_states_of_a_batch_go_back(tmp_path, name, always, monkeypatch):
    write_architecture(tmp_path, name, max_position_embeddings=512)
    model, rng = bf.llm.load(tmp_path, device="cpu"), random.Random(1)
    common = [rng.randrange(4, 64) for _ in range(130)]
    requests = [Request([*common[: rng.choice([30, 130])], 5 + i], 30, random_sampling(rng)) for i in range(8)]
    with engine_that_knows(model, requests, monkeypatch, streams=3) as engine:
        answers = [submit(engine, request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert (answer.wait().text, answer.ids, answer.finished) == alone(model, request, **EXACT)
        assert engine.counts().drafted_tokens > engine.counts().accepted_tokens > 0


def test_several_rows_of_a_sequence_are_in_one_pass_with_others(model, always, monkeypatch):
    requests = [Request([10 * i + 5] * 9, 30, Sampling(logit_bias={1: -100.0})) for i in range(3)]
    passes, verify = list[list[int]](), model.decoder.verify

    def noted(passages, samplers, drafts, activations):
        passes.append([len(tokens) + len(draft) for (_, tokens), draft in zip(passages, drafts, strict=False)])
        return verify(passages, samplers, drafts, activations)

    with engine_that_knows(model, requests, monkeypatch, streams=3) as engine:
        monkeypatch.setattr(model.decoder, "verify", noted)
        with engine._changed:
            answers = [submit(engine, request) for request in requests]
        for answer in answers:
            answer.wait()
        assert engine.counts().steps < 16
    assert any(min(rows) > 1 and len(rows) == 3 for rows in passes)


def test_a_request_may_do_without(model, always):
    request = Request([5, 6] * 20, 30, REPEATING)
    with Engine(model, draft="ngram", **EXACT) as engine:
        plain = ask(engine, Request(request.prompt, 30, request.sampling, draft=False))
        assert engine.counts().drafted_tokens == 0
        drafted = ask(engine, request)
        assert drafted.ticket.drafts.drafted > 0
    assert plain.ids == drafted.ids
    with Engine(model, **EXACT) as engine:
        assert ask(engine, request).ticket.drafts.drafted == 0


def test_free_text_is_watched_and_not_drafted(tmp_path, monkeypatch):
    """Each request by itself: one that repeats itself begins, and the others beside it do not."""
    monkeypatch.setattr(StepSeconds, "note", lambda self, rows, seconds: None)
    model, begun = small_model(tmp_path), []
    begin = model.decoder.begin_drafting
    monkeypatch.setattr(model.decoder, "begin_drafting", lambda: begun.append(True) or begin())
    few = dict.fromkeys(range(5, 25), 30.0)  # so many tokens that two in a row come again, and another one behind them
    free = [Request([5, 6, i], 60, Sampling(1.0, seed=i, logit_bias=few)) for i in (7, 8)]
    with Engine(model, draft="ngram", draft_length=7, **EXACT) as engine:
        for requests, drafts in ((free, False), ([*free, Request([5, 6], 60, REPEATING)], True)):
            answers = [submit(engine, request) for request in requests]
            for request, answer in zip(requests, answers, strict=True):
                assert answer.wait().ids == alone(model, request, **EXACT)[1]
            counts = engine.counts()
            assert bool(begun) == (counts.drafts > 0) == drafts
            assert [answer.ticket.drafts.drafted for answer in answers[:2]] == [0, 0]
    assert counts.drafted_tokens == answers[2].ticket.drafts.drafted
    assert counts.accepted_tokens == answers[2].ticket.drafts.accepted > 30


def test_an_answer_may_end_within_a_draft(model, always, monkeypatch):
    """By max_tokens, by a stop text, and by the model's end; the cache then goes on behind the answer."""
    sampling = Sampling(logit_bias={1: -100.0})
    whole = Request([9] * 20, 40, sampling)
    text, ids, _ = alone(model, whole, **EXACT)
    ending = Sampling(1.0, seed=3, logit_bias={1: 3.0})
    requests = [whole, Request([9] * 20, 60, ending)]
    with engine_that_knows(model, requests, monkeypatch, streams=2) as engine:
        for most in range(1, 12):
            answer = ask(engine, Request(whole.prompt, most, sampling))
            assert (answer.ids, answer.finished) == (ids[:most], "length")
            assert answer.ticket.drafts.accepted < most
        for at in range(4, 16):
            stop = text[at : at + 2]
            answer = ask(engine, Request(whole.prompt, 40, sampling, stop=(stop,)))
            assert (answer.text, answer.finished) == (text[: text.index(stop)], "stop")
        answer = ask(engine, requests[1])
        assert (answer.text, answer.ids, answer.finished) == alone(model, requests[1], **EXACT)
        assert answer.finished == "stop"
        longer = Request([*whole.prompt, *ids, 7, 8], 12, sampling)
        assert ask(engine, longer).ids == alone(model, longer, **EXACT)[1]


def test_logprobs_and_grammars_go_with_drafts(model, always):
    """A grammar masks each position: a drafted token that it forbids is wrong."""
    schema = {"type": "array", "items": {"enum": [11, 12]}, "minItems": 9, "maxItems": 9}
    found = []
    for draft in (None, "ngram"):
        with Engine(model, draft=draft, **EXACT) as engine:
            repeating = Request([5, 6, 7] * 9, 30, REPEATING, logprobs=3)
            answer = ask(engine, repeating)
            scored = [(token.id, token.logprob, token.top) for piece in answer.pieces for token in piece.tokens]
            json = ask(engine, Request([9, 10], 60, Sampling(1.0, seed=2), grammar=compiled(engine, schema)))
            found.append((scored, json.text, json.finished))
            counts = engine.counts()
    assert found[0] == found[1]
    assert len(found[0][0]) == 30
    assert found[0][1].lstrip().startswith("[")
    assert counts.accepted_tokens > 0


def test_preempted_requests_are_drafted_again(tmp_path, always, monkeypatch):
    model, rng = small_model(tmp_path), random.Random(1)
    requests = []
    for _ in range(6):
        bias = {**dict.fromkeys(model.tokenizer.ends, -100.0)}
        requests.append(Request(random_tokens(rng, 30), rng.randrange(70, 120), Sampling(0.8, seed=1, logit_bias=bias)))
    options = {"streams": 5, "context": 320, "cache_tokens": 320}
    with engine_that_knows(model, requests, monkeypatch, **options) as engine:
        answers = [submit(engine, request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert answer.wait().ids == alone(model, request, **EXACT)[1]
        counts = engine.counts()
    assert counts.preemptions > 0
    assert counts.accepted_tokens > counts.generated_tokens / 2


def test_a_drafter_without_room_is_switched_off_and_others_draft_on(model, always, monkeypatch):
    """The caches of a draft model have memory of their own."""
    requests = [Request([10 * i + 5] * 9, 40, Sampling(logit_bias={1: -100.0})) for i in range(3)]
    tried = []

    class Full(Oracle):
        def draft(self, sequence, most):
            if sequence[0] == requests[1].prompt[0]:
                tried.append(len(sequence))
                raise NoRoom("The KV cache is full.")
            return super().draft(sequence, most)

    with engine_that_knows(model, requests, monkeypatch, streams=3) as engine:
        texts = engine._make_drafter()._texts
        monkeypatch.setattr("billfish.llm.model.NgramDrafter", lambda: Full(texts))
        with engine._changed:
            answers = [submit(engine, request) for request in requests]
        for request, answer in zip(requests, answers, strict=True):
            assert answer.wait().ids == alone(model, request, **EXACT)[1]
    assert [answer.ticket.drafts.accepted > 20 for answer in answers] == [True, False, True]
    assert len(set(tried)) == 1  # in one step, and in no later one


def test_drafts_that_find_no_memory_become_rare(model, monkeypatch):
    """They are made for nothing, by a drafter that takes time."""
    request, submit_step, made = Request([5] * 9, 300, Sampling(logit_bias={1: -100.0})), model.decoder.submit, []

    def without_room(passages, samplers, activations, drafts=()):
        made.extend(len(draft) for draft in drafts)
        return submit_step(passages, samplers, activations)

    with engine_that_knows(model, [request], monkeypatch, streams=1) as engine:
        monkeypatch.setattr(model.decoder, "submit", without_room)
        assert ask(engine, request).ids == alone(model, request, **EXACT)[1]
        assert engine.counts().drafted_tokens == 0
    assert made[0] > 0
    assert sum(made) < 100


def test_a_drafted_step_is_over_before_its_slot_is_anothers(model, always, monkeypatch):
    """Where the device computes it meanwhile: its tokens are taken off the cache of the slot."""
    requests = [Request([10 * i + 5] * 9, 30, Sampling(logit_bias={1: -100.0})) for i in range(3)]
    with engine_that_knows(model, requests, monkeypatch, streams=1) as engine:
        monkeypatch.setattr(model.decoder, "overlaps", True)
        pending, look = [], engine._end_cancelled
        monkeypatch.setattr(engine, "_end_cancelled", lambda: pending.append(engine._pending) or look())
        for request in requests:
            assert ask(engine, request).ids == alone(model, request, **EXACT)[1]
        assert engine.counts().drafts > 0
    assert not any(step.drafts for step in pending if step is not None)


def test_who_goes_within_a_draft_is_gone(model, always, monkeypatch):
    endless = Request([5] * 9, 400, Sampling(logit_bias={1: -100.0}))
    with engine_that_knows(model, [endless], monkeypatch, streams=1) as engine:
        gone = threading.Event()

        def leave(chosen) -> None:
            gone.set()
            raise ConnectionError

        engine.submit(endless, leave)
        assert gone.wait(60)
        assert ask(engine, Request([7, 8], 5)).ids == alone(model, Request([7, 8], 5), **EXACT)[1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"draft": "mtp2"}, r"draft.*mtp2.*ngram"),
        ({"draft": "ngram", "draft_length": 100}, r"draft_length.*100.*1 to 7"),
        ({"draft": "ngram", "draft_length": 0}, r"draft_length.*0.*1 to 7"),
    ],
)
def test_engines_that_cannot_draft(model, how, message):
    with pytest.raises(bf.DataError, match=message):
        Engine(model, **how)


def test_a_server_tells_of_drafts(tmp_path, always):
    """In the usage of an answer, whole or streamed, and in /metrics; a request may switch them off."""
    write_model(tmp_path / "small.gguf", Small(context=256))
    body = {"prompt": "abab" * 20, "temperature": 0, "max_tokens": 40, "logit_bias": {"70": 100}}
    with serving(tmp_path / "small.gguf", streams=2, draft="ngram", draft_length=MOST_DRAFTED) as server:
        whole = send(server.url, "/v1/completions", body)[2]
        plain = send(server.url, "/v1/completions", {**body, "draft": False})[2]
        streamed = events(
            server.url, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        stop = whole["choices"][0]["text"][4:7]
        stopped = send(server.url, "/v1/completions", {**body, "stop": stop})[2]
        with urllib.request.urlopen(server.url + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
    details = whole["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    assert streamed[-1]["usage"]["completion_tokens_details"] == details
    assert plain["choices"][0]["text"] == whole["choices"][0]["text"]
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert {name: plain["usage"]["completion_tokens_details"][name] for name in none} == none
    assert stopped["choices"][0]["text"] == whole["choices"][0]["text"].split(stop)[0]
    counts = {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("billfish_")}
    assert counts["billfish_drafted_tokens_total"] >= counts["billfish_accepted_tokens_total"] > 0
    assert counts["billfish_drafts_total"] > 0


MESSAGES = [{"role": "user", "content": "abab" * 20}]
OTHERS = {
    "/v1/responses": {"input": "abab" * 20, "temperature": 0, "max_output_tokens": 40},
    "/v1/messages": {"messages": MESSAGES, "temperature": 0, "max_tokens": 40},
    "/api/generate": {"prompt": "abab" * 20, "raw": True, "stream": False, "options": {"temperature": 0}},
}


def test_other_apis_switch_drafts_off_and_tell_of_them(tmp_path, always, monkeypatch):
    """Ollama's has no object for the usage: its requests may do without drafts, and nothing tells of them."""
    monkeypatch.setattr("billfish.llm.model.NgramDrafter", lambda: Oracle([]))
    monkeypatch.setattr(Oracle, "draft", lambda self, sequence, most: [70] * most)
    write_model(tmp_path / "small.gguf", Small(context=256))
    with serving(tmp_path / "small.gguf", streams=2, draft="ngram") as server:

        def drafted() -> float:
            with urllib.request.urlopen(server.url + "/metrics") as answer:
                lines = answer.read().decode().splitlines()
            return next(float(line.split()[1]) for line in lines if line.startswith("billfish_drafted_tokens_total "))

        for path, body in OTHERS.items():
            before = drafted()
            plain, told = send(server.url, path, {**body, "draft": False})[2], drafted()
            assert told == before, path
            answer, now = send(server.url, path, body)[2], drafted()
            assert now > before, path
            if path == "/api/generate":
                assert answer["response"] == plain["response"]
                continue
            counts = [made["usage"].get("output_tokens_details", made["usage"]) for made in (plain, answer)]
            names = "accepted_prediction_tokens", "rejected_prediction_tokens"
            assert [counts[0][name] for name in names] == [0, 0], path
            assert sum(counts[1][name] for name in names) == now - before, path
