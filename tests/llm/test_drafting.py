"""Drafting: the same answer to the bit, whatever is drafted; and how many tokens are."""

from __future__ import annotations

import numpy as np
import pytest
from llm_architectures import MODELS, TOKENS, write_model
from llm_models import Small
from llm_models import write_model as write_gguf

import billfish as bf
from billfish.core.format import FORMATS
from billfish.llm import Model, load
from billfish.llm.drafting.draft_model import ModelDrafter
from billfish.llm.drafting.drafter import MOST_DRAFTED, Controller, Drafter, StepSeconds
from billfish.llm.drafting.ngram import NgramDrafter
from billfish.llm.generation import Generation
from billfish.llm.sampler import Sampling


class Oracle(Drafter):
    """Knows an answer, and lies about every `wrong`-th token."""

    def __init__(self, prompt: list[int], answer: list[int], wrong: int) -> None:
        self._all, self._prompt, self._wrong = [*prompt, *answer], len(prompt), wrong

    def draft(self, sequence, most):
        at = len(sequence)
        drafted = self._all[at : at + most]
        return [t if (at + i) % self._wrong else (t + 1) % 40 for i, t in enumerate(drafted)]


class Always(Controller):
    """Drafts as many tokens as it may."""

    def length(self, kind: int | None = 0, others: int = 0) -> int:
        return self.most


def answer(model, prompt, drafter, monkeypatch, *, activations, **how):
    """An answer with drafts in every step."""
    monkeypatch.setattr("billfish.llm.generation.Controller", Always)
    most = how.pop("max_tokens", 24)
    return Generation(
        model.decoder, model.tokenizer, prompt, most, Sampling(**how), activations, drafter=drafter
    ).finish()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(name: str, format: str | None = None):
        if (name, format) not in made:
            if not (folder / name).exists():
                write_model(folder / name, name, max_position_embeddings=512)
            how = {"quantize": format, "method": "rtn"} if format else {}
            made[name, format] = load(folder / name, device="cpu", **how)
        return made[name, format]

    return model


QUICK = ("llama3", "gpt-oss", "gemma4", "qwen35", "lfm2", "granitehybrid")
DRAFTED = [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in MODELS]


@pytest.mark.parametrize("name", DRAFTED)
@pytest.mark.parametrize("activations", ["exact", "q16", "q8"])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_the_answer_is_the_same(model_of, name, activations, how, monkeypatch):
    """Right drafts, wrong ones, and both in a step."""
    model = model_of(name, "q4_0")
    prompt = TOKENS[:11]
    plain = answer(model, prompt, None, monkeypatch, activations=activations, **how)
    for wrong in (1, 3, 1000):
        drafted = answer(
            model, prompt, Oracle(prompt, plain.tokens, wrong), monkeypatch, activations=activations, **how
        )
        assert drafted.tokens == plain.tokens, wrong
        assert drafted.text == plain.text
        assert drafted.finish_reason == plain.finish_reason
    if model.decoder.rows_alike(activations) > 1:
        assert drafted.drafts.accepted == drafted.drafts.drafted > 0
        assert drafted.drafts.steps < len(plain.tokens) - 1 or len(plain.tokens) == 2


@pytest.mark.parametrize("format", [*FORMATS, None])
@pytest.mark.parametrize("activations", ["q16", "q8"])
def test_logits_have_the_same_bits_beside_drafted_rows(model_of, format, activations):
    check_rows_alike(model_of("llama3", format), activations, 20)


@pytest.mark.parametrize("start", [61, 253])
@pytest.mark.parametrize("activations", ["exact", "q16", "q8"])
def test_logits_have_the_same_bits_where_slices_of_attention_end(model_of, start, activations):
    """After 256 positions; and after 64, as pages of a GPU's KV cache."""
    check_rows_alike(model_of("llama3", "q4_0"), activations, start)


def check_rows_alike(model: Model, activations: str, start: int) -> None:
    """So many rows behind `start` tokens, alone and together."""
    rows, text = model.decoder.rows_alike(activations), [3 + i * i % 50 for i in range(start + 8)]
    alone = model.cache()
    model.decoder.run([(alone, text[:start])], activations)
    expected = [model.decoder.scores([(alone, [t])], [1], activations)[0][0] for t in text[start : start + rows]]
    cache = model.cache()
    model.decoder.run([(cache, text[:start])], activations)
    [together] = model.decoder.scores([(cache, text[start : start + rows])], [rows], activations)
    assert np.array_equal(together, np.stack(expected))


@pytest.mark.parametrize(("activations", "most"), [("q8", 7), ("q16", 7), ("exact", 6)])
def test_a_draft_has_as_many_tokens_as_rows_are_alike(model_of, monkeypatch, activations, most):
    model, made = model_of("llama3", "q4_0"), []
    verify = model.decoder.verify

    def noted(passages, samplers, drafts, activations):
        made.extend(len(draft) for draft in drafts)
        return verify(passages, samplers, drafts, activations)

    monkeypatch.setattr(model.decoder, "verify", noted)
    how = {"activations": activations, "logit_bias": {1: -100.0}}
    plain = answer(model, TOKENS[:9], None, monkeypatch, **how)
    drafted = answer(model, TOKENS[:9], Oracle(TOKENS[:9], plain.tokens, 1000), monkeypatch, **how)
    assert drafted.tokens == plain.tokens
    assert max(made) == most


def test_logprobs_penalties_and_ends_are_the_same(model_of, monkeypatch):
    model, prompt = model_of("llama3", "q4_0"), TOKENS[:11]
    how = {"activations": "q16", "temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    plain = answer(model, prompt, None, monkeypatch, **how)
    drafted = answer(model, prompt, Oracle(prompt, plain.tokens, 4), monkeypatch, **how)
    assert drafted.tokens == plain.tokens
    for most in range(1, 9):  # an answer may end anywhere in a draft
        short = answer(model, prompt, Oracle(prompt, plain.tokens, 1000), monkeypatch, max_tokens=most, **how)
        assert short.tokens == plain.tokens[:most]


def test_a_cache_goes_on_behind_a_drafted_answer(model_of, monkeypatch):
    model, prompt = model_of("gemma4", "q4_0"), TOKENS[:11]
    cache = model.cache()
    first = model.generate(prompt, max_tokens=12, draft="ngram", cache=cache)
    more = [*prompt, *first.tokens, 5, 6]
    assert model.generate(more, max_tokens=6, cache=cache).tokens == model.generate(more, max_tokens=6).tokens


def test_a_draft_model(model_of):
    model, small = model_of("llama3", "q8_0"), model_of("llama3", "q4_0")
    plain = model.generate(TOKENS[:9], max_tokens=16)
    drafted = model.generate(TOKENS[:9], max_tokens=16, draft=small)
    assert drafted.tokens == plain.tokens
    assert drafted.drafts.drafted > 0


def test_a_draft_model_reads_a_long_prompt_in_pieces(model_of, monkeypatch):
    """Two of them share what a step has room for."""
    model, small = model_of("llama3", "q8_0"), model_of("llama3", "q4_0")
    decoder, fed = small.decoder, list[list[int]]()
    choose = decoder.choose

    def noted(passages, samplers, activations):
        fed.append([len(tokens) for _, tokens in passages])
        return choose(passages, samplers, activations)

    monkeypatch.setattr(decoder, "prefill_budget", lambda decoding: 12)
    monkeypatch.setattr(decoder, "choose", noted)
    drafters = [ModelDrafter(decoder), ModelDrafter(decoder)]
    asked = [(drafters[0], TOKENS[:20], 2), (drafters[1], TOKENS[:30], 2)]
    made = [ModelDrafter.draft_together(asked) for _ in range(4)]
    assert fed[:4] == [[12], [12], [8], [1]]
    assert max(sum(step) for step in fed) == 12
    expected = [each.draft(text, 2) for each, text, _ in asked]
    assert made == [[[], []], [expected[0], []], [expected[0], []], expected]
    assert all(map(len, expected))
    monkeypatch.setattr(decoder, "choose", choose)
    plain = model.generate(TOKENS[:40], max_tokens=16)
    drafted = model.generate(TOKENS[:40], max_tokens=16, draft=small)
    assert drafted.tokens == plain.tokens
    assert drafted.drafts.drafted > 0


def test_a_draft_model_with_another_vocabulary(model_of, tmp_path):
    write_gguf(tmp_path / "other.gguf", Small())
    other = load(tmp_path / "other.gguf", device="cpu")
    with pytest.raises(bf.DataError, match=r"draft model.*vocabulary"):
        model_of("llama3", "q4_0").generate(TOKENS[:4], draft=other)


@pytest.mark.parametrize("draft", ["mtp2", 5])
def test_a_drafter_that_is_none(model_of, draft):
    with pytest.raises(bf.DataError, match=r"draft.*ngram"):
        model_of("llama3", "q4_0").generate(TOKENS[:4], draft=draft)


@pytest.mark.parametrize("length", [0, 100, 2.5, True])
def test_a_length_that_no_step_has_room_for(model_of, length):
    with pytest.raises(bf.DataError, match=r"draft_length.*1 to 7"):
        model_of("llama3", "q4_0").generate(TOKENS[:4], draft="ngram", draft_length=length)


def test_drafts_of_one_token(model_of):
    model = model_of("llama3", "q4_0")
    plain = model.generate(TOKENS[:9], max_tokens=20, activations="q8")
    drafted = model.generate(
        TOKENS[:9], max_tokens=20, draft=model_of("llama3", "q8_0"), draft_length=1, activations="q8"
    )
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.drafts.drafted <= drafted.drafts.steps


def test_recurrent_states_go_back_behind_drafts(model_of, monkeypatch):
    """To any drafted row, across the positions of checkpoints that stay, and when another text goes on there."""
    model, prompt = model_of("qwen35", "q4_0"), [3 + i % 50 for i in range(58)]
    plain = answer(model, prompt, None, monkeypatch, activations="q16", max_tokens=20)
    for wrong in range(2, 8):
        cache = model.cache()
        oracle = Oracle(prompt, plain.tokens, wrong)
        drafted = Generation(
            model.decoder, model.tokenizer, prompt, 20, Sampling(), "q16", cache, drafter=oracle
        ).finish()
        assert drafted.tokens == plain.tokens
        assert drafted.drafts.drafted > drafted.drafts.accepted
        other = [*prompt, *plain.tokens[:9], 7, 8]
        expected = model.generate(other, max_tokens=5, activations="q16").tokens
        assert model.generate(other, max_tokens=5, activations="q16", cache=cache).tokens == expected


def test_drafts_that_find_no_memory_become_rare(model_of, monkeypatch):
    model, made = model_of("llama3"), []
    submit = model.decoder.submit

    def without_room(passages, samplers, activations, drafts=()):
        made.extend(len(draft) for draft in drafts)
        return submit(passages, samplers, activations)

    plain = model.generate(TOKENS[:9], max_tokens=120, activations="exact", logit_bias={1: -100.0}).tokens
    monkeypatch.setattr(model.decoder, "submit", without_room)
    oracle = Oracle(TOKENS[:9], plain, 1000)
    found = Generation(
        model.decoder, model.tokenizer, TOKENS[:9], 120, Sampling(0.0, logit_bias={1: -100.0}), "exact", drafter=oracle
    ).finish()
    assert found.tokens == plain
    assert found.drafts.drafted == 0
    assert made[0] > 0
    assert sum(made) < 100


@pytest.mark.parametrize(("name", "activations"), [("gpt-oss", "exact")])
def test_a_model_that_a_draft_would_change(model_of, name, activations):
    """An expert's rows are not known before."""
    with pytest.raises(bf.DataError, match=rf"drafting.*{name}.*cpu.*q16"):
        model_of(name, "q4_0").generate(TOKENS[:4], draft="ngram", activations=activations)


# ---- what is drafted -------------------------------------------------------------------------------------------------


def test_ngrams_are_found_where_they_came_last():
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 1, 2, 3]
    assert drafter.draft(text, 3) == [5, 6, 7]
    assert drafter.draft([*text, 4], 2) == [9, 1]  # four tokens in a row go before three
    assert NgramDrafter().draft([8, 8], 4) == []
    assert NgramDrafter().draft([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # what repeats itself goes on


def test_more_that_is_alike_is_another_kind():
    text = [*range(20, 50), 7]
    kinds = [NgramDrafter().kind([*text, *range(20, 20 + alike)]) for alike in (1, 2, 3, 4, 7, 8, 15, 16, 29)]
    assert kinds == [None, 0, 1, 2, 2, 3, 3, 4, 4]
    assert len(NgramDrafter.acceptance) == 5


def test_nothing_is_drafted_before_it_is_seen_to_pay(model_of, monkeypatch):
    """A look-up is compared with the tokens that plain steps choose, whatever --draft-length is. `drafts` has none."""
    monkeypatch.setattr(StepSeconds, "note", lambda self, rows, seconds: None)
    model, begun = model_of("llama3", "q4_0"), []
    monkeypatch.setattr(model.decoder, "drafting", False)  # other tests have the same model
    begin = model.decoder.begin_drafting
    monkeypatch.setattr(model.decoder, "begin_drafting", lambda: begun.append(True) or begin())
    free = {"temperature": 1.0, "seed": 5, "max_tokens": 60, "logit_bias": {1: -100.0}}
    repeated = {"max_tokens": 60, "logit_bias": {9: 100.0}}
    for how, length in ((free, None), (free, 7), (repeated, None)):
        assert not begun
        plain = model.generate(TOKENS[:9], **how)
        drafted = model.generate(TOKENS[:9], draft="ngram", draft_length=length, **how)
        assert drafted.tokens == plain.tokens
        assert drafted.drafts.steps == 59 - drafted.drafts.accepted
        assert (drafted.drafts.drafted > 0) == bool(begun)
    assert drafted.drafts.accepted == drafted.drafts.drafted > 40
    again = model.generate(TOKENS[:9], draft="ngram", **repeated)  # the model drafts already, so nothing is watched
    assert (again.tokens, again.drafts.steps < drafted.drafts.steps) == (drafted.tokens, True)


def test_a_draft_model_is_not_watched(model_of):
    """Each look would take it a pass."""
    model = model_of("llama3", "q8_0")
    drafted = model.generate(TOKENS[:9], max_tokens=4, draft=model, logit_bias={1: -100.0})
    assert drafted.drafts.drafted > 0


def watched_until(text: list[int], start: int) -> int | None:
    """After how many tokens of the answer drafting begins."""
    controller, drafter = Controller(MOST_DRAFTED, NgramDrafter.acceptance, watching=True), NgramDrafter()
    for at in range(start, len(text)):
        if controller.length(4):
            return at - start
        controller.note(0, 0, 4)
        controller.watch(drafter, text[:at], text[at])
    return None


def test_watching_ends_where_more_than_a_third_could_be_drafted():
    known, new = [*range(100)], [*range(200, 260)]
    assert watched_until([*known, 7, 8, *range(9, 60)], 102) == 6
    assert watched_until([*known, 7, 8, *range(9, 13), 99, *range(13, 60)], 102) == 4 + 3 + 4
    assert watched_until(known + new, 100) is None
    for name, others, expected in (([1, 2, 3, 4, 5], 1, 17), ([1, 2, 3, 4], 2, None)):  # known from its third token on
        text = [*name]
        for i in range(0, 60, others):
            text += [*name, *new[i : i + others]]
        assert watched_until(text, len(name)) == expected


def test_the_controller_drafts_what_pays():
    good, bad = Controller(MOST_DRAFTED), Controller(MOST_DRAFTED)
    tried = []
    for _ in range(60):
        good.seconds.note(1 + good.length(), 0.01 + 0.001 * good.length())
        good.note(good.length(), good.length())
        tried.append(bad.length())
        bad.seconds.note(1 + tried[-1], 0.01 + 0.004 * tried[-1])
        bad.note(tried[-1], 0)
    assert good.length() == MOST_DRAFTED
    assert 1 <= sum(tried[-30:]) <= 2  # now and then one token is tried


def test_the_controller_knows_kinds_of_drafts():
    controller = Controller(MOST_DRAFTED, (0.5, 0.5))
    for _ in range(30):
        controller.seconds.note(4, 0.012)
        controller.seconds.note(1, 0.01)
        controller.note(3, 0, 0)
        controller.note(3, 3, 1)
    assert controller.length(0) == 0
    assert controller.length(1) == MOST_DRAFTED
    assert controller.length(None) == 0


def test_the_controller_counts_the_rows_of_others():
    """A row that is cheap where the weights are waited for costs more in a large batch."""
    seconds = StepSeconds()
    for rows in range(1, 65):
        seconds.note(rows, max(0.01, 0.001 * rows))
    controller = Controller(MOST_DRAFTED, (0.6,), seconds)
    assert controller.length(0, others=0) == MOST_DRAFTED
    assert controller.length(0, others=6) == 3
    assert controller.length(0, others=40) == 0


def test_a_controller_of_one_row_drafts_nothing():
    assert Controller(0).length() == 0
