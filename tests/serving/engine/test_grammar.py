"""Answers that must be JSON, and JSON of a schema. jsonschema says whether they are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing, contextmanager

import jsonschema
import pytest
from serving_schemas import random_schema
from serving_support import Collected, alone, ask, compiled, random_tokens, small_model, submit

import billfish as bf
from billfish.checkpoints.tokenizer.tokenizer import UNUSED
from billfish.llm.grammar import CompiledGrammar, Grammar, Vocabulary, json_object, json_schema
from billfish.llm.sampler import Sampling
from billfish.serving.engine.engine import Engine
from billfish.serving.engine.grammar_compiler import GrammarCompiler
from billfish.serving.engine.requests import Request

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["llama", "gemma"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bf.llm.Model:
    """Byte-level tokens, and SentencePiece's, whose texts begin with a space."""
    return small_model(tmp_path_factory.mktemp("grammar"), architecture=request.param, context=1024)


@pytest.fixture
def engine(model: bf.llm.Model) -> Iterator[Engine]:
    with Engine(model, streams=7, queue=500) as engine:
        yield engine


def assert_valid(answer: Collected, schema: dict) -> None:
    assert answer.finished == "stop", (answer.finished, answer.pieces[-1].error, schema, answer.text)
    jsonschema.validate(json.loads(answer.text), schema)


def test_generated_schemas_get_valid_answers(engine):
    """100 for each model, drawn and greedy, beside each other and beside answers without a grammar."""
    rng, asked = random.Random(0), []
    for seed in range(100):
        schema = random_schema(rng)
        sampling = Sampling(rng.choice([0.0, 1.0, 1.5]), seed=seed, min_p=rng.choice([0.0, 0.05]))
        request = Request(random_tokens(rng, 5), 900, sampling, grammar=compiled(engine, schema))
        asked.append((submit(engine, request), schema))
        if seed % 10 == 0:
            submit(engine, Request(random_tokens(rng, 40), 20))
    for answer, schema in asked:
        assert_valid(answer.wait(), schema)


def test_answers_with_and_without_a_grammar_beside_each_other(model):
    with Engine(model, streams=4, activations="exact") as engine:
        plain = Request([9, 10], 60, Sampling(1.0, seed=1))
        person = compiled(engine, PERSON)
        answers = [submit(engine, Request([9, 10], 400, Sampling(1.0), grammar=person)) for _ in range(3)]
        assert ask(engine, plain).text == alone(model, plain, activations="exact")[0]
        texts = {answer.wait().text for answer in answers}
    assert len(texts) == 1
    jsonschema.validate(json.loads(texts.pop()), PERSON)


@pytest.mark.promise(
    "server",
    "a JSON schema is bounded and compiled in a process of its own; no schema ends the server or keeps others waiting",
)
def test_long_texts_without_a_choice_are_not_encoded_at_each_token(model, monkeypatch):
    """llguidance asks for the tokens of all that is left, for each token again: it stalled every stream."""
    asked, encode = [0], type(model.tokenizer).encode

    def counted(self, text, **options):
        asked.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(model.tokenizer), "encode", counted)
    schema = {"const": "x y" * 1000}
    with Engine(model, streams=1, queue=1) as engine:
        answer = ask(engine, Request([5, 6], 40, Sampling(0.0), grammar=compiled(engine, schema)))
    assert json.dumps(schema["const"]).startswith(answer.text)
    assert len(answer.text) >= 40
    assert max(asked) <= 1000


def test_any_object(engine):
    for seed in range(3):
        answer = ask(
            engine, Request([9, 10], 300, Sampling(1.0, seed=seed), grammar=engine.compile(json_object()).result())
        )
        assert answer.finished == "length" or isinstance(json.loads(answer.text), dict)
        assert answer.text.startswith("{")


def test_an_answer_that_is_cut_is_told_so(engine):
    answer = ask(engine, Request([9, 10], 3, grammar=compiled(engine, PERSON)))
    assert answer.finished == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"$ref": "#"}, "nothing satisfies it"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "nothing satisfies it"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "https://example.com/other"}, "example.com"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"const": {1, 2}}, "not JSON serializable"),
        ([1], "Expecting object schema"),
    ],
)
def test_schemas_that_cannot_be_used_say_why(engine, schema, why):
    with pytest.raises(bf.DataError, match=rf"json_schema.*schema.*{why}"):
        compiled(engine, schema)


def test_a_grammar_that_is_none(engine):
    with pytest.raises(bf.DataError, match=r"json_schema.*schema"):
        engine.compile(Grammar("nothing like that")).result()


def test_a_grammar_that_fails_ends_its_own_request(model, monkeypatch):
    class Panic(BaseException):
        """As the library raises, which no `except Exception` takes."""

    def panic(self: object, token: int) -> None:
        raise Panic("inside the library")

    with Engine(model, streams=2, activations="exact") as engine:
        plain = Request([9, 10], 30, Sampling(1.0, seed=1))
        other = submit(engine, plain)
        grammar = engine.compile(json_object()).result()
        matcher = grammar.matcher()
        state = type("State", (), {"compute_bitmask": panic, "is_error": lambda self: False})()
        monkeypatch.setattr(CompiledGrammar, "matcher", lambda self: matcher)
        monkeypatch.setattr(matcher, "_state", state)
        failed = ask(engine, Request([9, 10], 30, grammar=grammar))
        assert failed.finished == "failed"
        assert "the answer cannot go on" in failed.pieces[-1].error
        assert other.wait().text == alone(model, plain, activations="exact")[0]


@contextmanager
def compiler(model: bf.llm.Model) -> Iterator[GrammarCompiler]:
    with closing(GrammarCompiler(Vocabulary(model.tokenizer, model.config.vocabulary))) as made:
        yield made


def test_tokens_without_a_text_are_in_no_answer(model, monkeypatch):
    """Neither control tokens nor those that only fill up the vocabulary, whatever their names look like."""
    kinds = list(model.tokenizer.kinds)
    kinds[50] = UNUSED
    monkeypatch.setattr(model.tokenizer, "kinds", kinds)
    with compiler(model) as made:
        matcher = made.compile(json_schema({"type": "string"})).result().matcher()
    quote = next(token for token in range(261) if model.tokenizer.piece_bytes(token) == b'"')
    matcher.take(quote)
    allowed = matcher.allowed()
    assert len(allowed) == model.config.vocabulary
    assert not allowed[[0, 1, 2, 3, 50]].any()
    assert allowed[[51, 60, quote]].all()
    matcher.take(quote)
    assert matcher.complete


def test_a_model_without_an_end_takes_no_grammar(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "ends", set())
    with compiler(model) as made, pytest.raises(bf.DataError, match="no end token"):
        made.compile(json_object()).result()


def test_smollm2_fills_in_a_schema():
    model = bf.llm.load(device="cpu")
    with Engine(model, streams=1, context=256) as engine:
        prompt = model.encode("Describe a person as JSON.")
        assert_valid(ask(engine, Request(prompt, 60, grammar=compiled(engine, PERSON))), PERSON)
