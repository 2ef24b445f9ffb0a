"""The parts of an engine one by one: cuts of prompts, slots, stop texts, tokens and their probabilities."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np
import pytest
from kv_cache_support import by_position
from serving_support import alone, ask, random_tokens, small_model

import billfish as bf
from billfish.llm.detokenizer import HeldText
from billfish.llm.kv_cache import shared_length
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.kv_slots import Cuts, Slots
from billfish.serving.engine.requests import Request
from billfish.serving.engine.scheduler import share_out

CUTS = Cuts(chunk=256, smallest=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bf.llm.Model:
    return small_model(tmp_path_factory.mktemp("parts"))


# ---- cuts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [CUTS, Cuts(64, 16), Cuts(256, 256)])
def test_prompts_are_read_in_parts_that_take_the_kernels_of_the_whole(cuts):
    """Each token is in a part of few tokens if, and only if, it is in a chunk of few tokens of the prompt alone."""
    for prompt in (*range(1, 40), *range(240, 290), 511, 512, 513, 529):
        for share in (1, 16, 50, 64, cuts.chunk - 16):
            read, parts = 0, []
            while read < prompt:
                parts.append(cuts.part(read, prompt, share))
                read += parts[-1]
            assert read == prompt
            assert max(parts) <= max(share, cuts.smallest) + cuts.smallest
            tail = prompt % cuts.chunk
            if 0 < tail < cuts.smallest:
                assert parts[-1] == tail
            assert min(parts[: -1 if 0 < tail < cuts.smallest else None], default=cuts.smallest) >= cuts.smallest


def test_what_is_left_of_a_prompt_is_a_whole_part():
    for prompt in range(1, 600, 7):
        for shared in range(0, prompt + 1, 5):
            there = CUTS.reusable(shared, prompt)
            assert 0 <= there <= shared
            assert there % 16 == 0
            assert there == 0 or CUTS.body(prompt) - there >= 16
    assert CUTS.reusable(100, 100) == 80
    assert CUTS.reusable(100, 400) == 96
    assert Cuts(256, 256).reusable(600, 1000) == 512


@dataclass(eq=False)
class Reading:
    left: int
    decodes: bool = False

    def part(self, share: int) -> int:
        return CUTS.part(0, self.left, share)


def test_prompts_are_read_first_come_first_served():
    long, short, decoding = Reading(1000), Reading(20), Reading(1, decodes=True)
    assert share_out([long, short], 64, 16) == {long: 64}
    assert share_out([short, long], 64, 16) == {short: 20, long: 44}
    assert share_out([short, long], 30, 16) == {short: 20}
    assert share_out([long, decoding, short], 64, 16) == {long: 64, decoding: 1}
    assert share_out([decoding, long], 0, 16) == {decoding: 1, long: 16}, "a full step does not starve prompts"


def test_every_prompt_is_read_in_its_turn():
    """A step has at most the budget, and less than the smallest part above it."""
    rng = random.Random(8)
    waiting = [Reading(rng.randrange(16, 600)) for _ in range(40)]
    ended, order = list[Reading](), list(waiting)
    while waiting:
        parts = share_out(waiting, 64, 16)
        assert 0 < sum(parts.values()) < 64 + 16
        for reading, part in parts.items():
            reading.left -= part
        ended += [reading for reading in waiting if reading.left == 0]
        waiting = [reading for reading in waiting if reading.left]
    assert ended == order


# ---- slots ----------------------------------------------------------------------------------------------------------


def fill(slots: Slots, model: bf.llm.Model, tokens: list[int]):
    slot = slots.take(tokens, slots.hashes(tokens))
    model.decoder.run([(slot.cache, tokens[len(slot.cache.tokens) :])], "exact")
    slot.read = len(tokens)
    slots.note_growth()
    return slot


def take(slots: Slots, tokens: list[int]):
    return slots.take(tokens, slots.hashes(tokens))


def test_slots_are_taken_over_or_copied(model):
    slots, rng = Slots(model.decoder, 3, 256, CUTS, exact=False), random.Random(1)
    start, other = random_tokens(rng, 64), random_tokens(rng, 64)
    a = fill(slots, model, start)
    slots.give_back(a, keep=True)
    b = take(slots, [*start, *other])
    assert b is a, "an idle slot with little else in it is taken over"
    model.decoder.run([(b.cache, other)], "exact")
    c = take(slots, [*start, *other])
    assert c is not a
    assert c.cache.tokens == start
    for copied, own in zip(by_position(c.cache), by_position(a.cache), strict=True):
        np.testing.assert_array_equal(copied[:, :, :64], own[:, :, :64])
    assert slots.free == 1
    slots.give_back(c, keep=False)
    assert (c.cache.tokens, c.read) == ([], 0)


def test_a_long_text_is_not_given_up_for_a_short_beginning(model):
    slots, rng = Slots(model.decoder, 2, 256, CUTS, exact=False), random.Random(2)
    text = random_tokens(rng, 200)
    a = fill(slots, model, text)
    slots.give_back(a, keep=True)
    b = take(slots, [*text[:48], *random_tokens(rng, 60)])
    assert b is not a
    assert b.cache.tokens == text[:48]
    assert len(a.cache.tokens) == 200


def test_the_oldest_text_goes_first(model):
    slots, rng = Slots(model.decoder, 3, 128, CUTS, exact=False), random.Random(3)
    texts = [random_tokens(rng, 40) for _ in range(3)]
    taken = [fill(slots, model, text) for text in texts]
    for slot in (taken[1], taken[2], taken[0]):
        slots.give_back(slot, keep=True)
    assert [take(slots, random_tokens(rng, 40)) for _ in range(3)] == [taken[1], taken[2], taken[0]]


def test_exact_prompts_share_only_what_was_read(model):
    text = random_tokens(random.Random(4), 100)
    for exact, length in ((True, 48), (False, 80)):
        slots = Slots(model.decoder, 2, 128, CUTS, exact=exact)
        fill(slots, model, text[:50])
        slots._slots[-1].cache.tokens += text[50:]  # of an answer
        slots.note_growth()
        longer = [*text, *[5] * 2]
        assert slots.reuse(longer, slots.hashes(longer)) == length
        assert slots.reuse(longer, slots.hashes(longer, b"another tenant")) == 0


@pytest.mark.parametrize(("cuts", "length"), [(Cuts(32, 32), 32), (CUTS, 90)])
def test_a_cache_goes_on_behind_a_checkpoint(model, cuts, length, monkeypatch):
    """Where parts are chunks, behind one at the end of a chunk."""
    slots, text = Slots(model.decoder, 1, 256, cuts, exact=False), random_tokens(random.Random(6), 120)
    cache = fill(slots, model, text).cache
    monkeypatch.setattr(cache, "restorable", lambda n: max(at for at in (0, 32, 90) if at <= n))
    longer = [*text, *[5] * 100]
    assert slots.reuse(longer, slots.hashes(longer)) == length


def test_shared_length():
    rng = random.Random(5)
    for _ in range(300):
        a = [rng.randrange(2) for _ in range(rng.randrange(12))]
        b = [rng.randrange(2) for _ in range(rng.randrange(12))]
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert shared_length(a, b) == expected
        assert shared_length(a, a) == len(a)


# ---- stop texts -----------------------------------------------------------------------------------------------------


def test_no_text_of_a_stop_goes_out():
    rng = random.Random(6)
    for _ in range(500):
        text = "".join(rng.choice("ab\n") for _ in range(30))
        stops = tuple("".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(3)))
        held, out, start = HeldText(stops), "", 0
        while start < len(text) and not held.stop:
            end = start + rng.randrange(1, 5)
            out += held.push(text[start:end])
            start = end
            # Whatever is out cannot become part of a stop text.
            if not held.stop:
                seen = text[:start]
                waits = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
                assert out == seen[: len(seen) - waits]
        first = min((text[:start].find(stop) for stop in stops if stop in text[:start]), default=-1)
        assert bool(held.stop) == (first >= 0)
        assert text[max(first, 0) :].startswith(held.stop)
        assert out + held.rest() == (text[:first] if held.stop else text)


def test_stop_texts_take_linear_time():
    """Each token used to be compared with each beginning of each stop text, by copying it."""
    length = 50_000
    held = HeldText((" " * length, *["b" + " " * length] * 15))
    started = time.process_time()
    for _ in range(2 * length // 64):
        held.push(" " * 64)
        if held.stop:
            break
    assert held.stop
    assert time.process_time() - started < 10  # seconds; it took minutes


def test_stops_end_answers_across_tokens(model):
    """The small models' tokens are bytes, so that every longer stop is spread over several."""
    rng, tried = random.Random(7), 0
    with Engine(model, streams=2, activations="exact") as engine:
        for seed in range(12):
            request = Request(random_tokens(rng, 10), 40, Sampling(1.0, seed=seed, logit_bias={1: -100.0}))
            whole = alone(model, request, activations="exact")[0]
            at = rng.randrange(5, 20)
            stop = whole[at : at + 3]
            answer = ask(engine, Request(request.prompt, 40, request.sampling, stop=("never that", stop)))
            assert (answer.text, answer.finished) == (whole[: whole.find(stop)], "stop")
            data = b"".join(token.data for piece in answer.pieces for token in piece.tokens)
            assert data.decode(errors="replace").startswith(answer.text)
            assert stop not in data.decode(errors="replace")
            tried += answer.ticket.completion_tokens > len(answer.ids)
    assert tried > 6


def test_what_may_begin_a_stop_comes_with_the_end(model):
    with Engine(model, streams=1, activations="exact") as engine:
        request = Request([9, 10, 11], 10, Sampling(logit_bias={1: -100.0}))
        whole, ids, _ = alone(model, request, activations="exact")
        answer = ask(engine, Request(request.prompt, 10, request.sampling, stop=(whole[-1] + "x",)))
        assert (answer.text, answer.ids, answer.finished) == (whole, ids, "length")


def test_characters_are_whole(model):
    """Random bytes: pieces together are what all of them decode to at once."""
    with Engine(model, streams=2, activations="exact") as engine:
        for seed in range(5):
            answer = ask(engine, Request([5, 6, 7], 60, Sampling(2.0, seed=seed)))
            assert answer.text == model.tokenizer.decode(answer.ids)
            assert all(token.data == model.tokenizer.piece_bytes(token.id) for p in answer.pieces for token in p.tokens)


# ---- probabilities --------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_scores_before_any_setting(model):
    how = Sampling(0.7, seed=3, top_k=5, logit_bias={9: 4.0}, presence_penalty=1.0)
    with Engine(model, streams=2, activations="exact") as engine:
        answer = ask(engine, Request([5, 6, 7, 8], 8, how, logprobs=3))
        bare = ask(engine, Request([5, 6, 7, 8], 8, how, logprobs=0))
        none = ask(engine, Request([5, 6, 7, 8], 8, how))
    assert answer.ids == bare.ids == none.ids
    tokens = [token for piece in answer.pieces for token in piece.tokens]
    scores = model.logits([5, 6, 7, 8, *answer.ids])[3:].astype(np.float64)
    expected = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    for token, row in zip(tokens, expected, strict=False):
        assert token.logprob == pytest.approx(row[token.id], abs=1e-4)
        assert [other.id for other in token.top] == np.argsort(-row)[:3].tolist()
        assert [other.logprob for other in token.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)
    assert all(token.top == () and token.logprob is not None for piece in bare.pieces for token in piece.tokens)
    assert all(token.top == () and token.logprob is None for piece in none.pieces for token in piece.tokens)


def test_offsets_are_where_the_text_of_a_token_begins(model):
    with Engine(model, streams=1, activations="exact") as engine:
        answer = ask(engine, Request([5, 6, 7], 50, Sampling(1.5, seed=1)))
    tokens = [token for piece in answer.pieces for token in piece.tokens]
    for i, token in enumerate(tokens):
        before = model.tokenizer.stream(answer.ids[:i])
        *complete, _ = before
        assert token.offset == len("".join(complete))
