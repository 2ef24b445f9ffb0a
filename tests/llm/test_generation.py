"""What Model.generate and Model.stream return, and the settings that they share with the server."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref

import pytest
from llm_models import Small, write_model

import billfish as bf

HOW = {"max_tokens": 40, "activations": "exact", "temperature": 2.0, "seed": 3}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("generation") / "small.gguf"
    write_model(file, Small(context=512))
    return file


@pytest.fixture(scope="module")
def model(path):
    return bf.llm.load(path)


def test_an_answer_is_complete_when_generate_returns(model):
    answer = model.generate("ab", **HOW)
    assert answer.finish_reason in ("stop", "length")
    assert answer.text == str(answer) == "".join(answer)
    assert answer.text == "".join(model.stream("ab", **HOW))
    assert list(answer) == []  # pieces are read once
    assert repr(answer.text) in repr(answer)
    assert answer.logprobs is None


def test_a_stream_grows_while_it_is_read(model):
    stream = model.stream("ab", **HOW)
    assert (stream.text, stream.tokens, stream.finish_reason) == ("", [], None)
    first = next(stream)
    assert stream.text == first
    assert stream.finish_reason is None
    assert 1 <= len(stream.tokens) < 40
    assert stream.finish().text == first + "".join(stream)


def test_coroutines_give_the_same_answers(model):
    async def both() -> tuple[list[str], list[str]]:
        answers = await asyncio.gather(*(model.generate_async(each, **HOW) for each in ("ab", "b")))
        pieces = [piece async for piece in model.stream("ab", **HOW)]
        return [answer.text for answer in answers], pieces

    texts, pieces = asyncio.run(both())
    assert texts == [model.generate(each, **HOW).text for each in ("ab", "b")]
    assert "".join(pieces) == texts[0]
    with pytest.raises(bf.DataError, match="temperature"):
        asyncio.run(model.generate_async("ab", temperature=-1))


def test_a_cancelled_task_decodes_no_further(model):
    async def cancelled() -> int:
        answer = model.stream("ab", **{**HOW, "max_tokens": 400})
        task = asyncio.create_task(answer.finish_async())
        while not answer.tokens:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(time.sleep, 0)
        count = len(answer.tokens)
        await asyncio.sleep(0.05)
        assert len(answer.tokens) <= count + 1
        return len(answer.tokens)

    assert asyncio.run(cancelled()) < 400


@pytest.mark.parametrize("several", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_in_it(model, several):
    whole = model.generate("ab", **HOW).text
    stop = whole[len(whole) // 2 :][:2]
    answer = model.generate("ab", stop=["never comes", stop] if several else stop, **HOW)
    assert (answer.text, answer.finish_reason) == (whole[: whole.find(stop)], "stop")


def test_log_probabilities(model):
    answer = model.generate([5, 6, 7], max_tokens=4, activations="exact", logprobs=3)
    assert [token.id for token in answer.logprobs] == answer.tokens
    for token in answer.logprobs:
        assert token.top[0].id == token.id, "greedy decoding takes the most probable token"
        assert [one.logprob for one in token.top] == sorted((one.logprob for one in token.top), reverse=True)
    for alone in (0, True):
        chosen = model.generate([5, 6, 7], max_tokens=4, activations="exact", logprobs=alone).logprobs
        assert [(token.logprob, token.top) for token in chosen] == [(token.logprob, ()) for token in answer.logprobs]
    assert model.generate([5], max_tokens=1, logprobs=False).logprobs is None


def test_an_answer_that_must_be_json(model):
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = model.generate("ab", response_format=format, **HOW)
    assert answer.finish_reason == "stop"
    assert set(json.loads(answer.text)) == {"a"}
    assert model.generate("ab", response_format={"type": "text"}, **HOW).text == model.generate("ab", **HOW).text
    cut = model.generate("ab", response_format={"type": "json_object"}, max_tokens=1)
    assert cut.text.startswith("{")
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("stop", [""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", "yes"),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema", "schema": SCHEMA}),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", 5),
    ],
)
def test_a_setting_that_is_wrong_is_named(model, setting, value):
    with pytest.raises(bf.DataError, match=f"llm.generate.*{setting}"):
        model.generate("ab", **{setting: value})


def test_none_is_no_stop_string(model):
    assert model.generate("ab", stop=None, **HOW).text == model.generate("ab", **HOW).text


def test_a_schema_that_nothing_satisfies(model):
    schema = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    with pytest.raises(bf.DataError, match="schema"):
        model.generate("ab", response_format={"type": "json_schema", "json_schema": {"schema": schema}})


def test_variables_of_the_chat_template(tmp_path):
    write_model(tmp_path / "m.gguf", Small(template="{{ messages[0].content }}{% if thinks %}ab{% endif %}"))
    with bf.llm.load(tmp_path / "m.gguf") as model:
        assert model.encode("ab", chat_template_kwargs={"thinks": True}) == model.tokenize("abab")
        assert model.encode("ab", chat_template_kwargs={"thinks": False}) == model.encode("ab") == model.tokenize("ab")
        answer = model.generate("ab", chat_template_kwargs={"thinks": True}, max_tokens=1)
        assert answer.prompt_tokens == len(model.tokenize("abab"))


def test_text_to_tokens_and_back(model):
    assert model.tokenize("<s>ab") == [0, *model.tokenize("ab")]
    assert len(model.tokenize("<s>ab", special=False)) == len("<s>") + 1
    assert model.detokenize(model.tokenize("<s>ab é")) == "ab é"
    with pytest.raises(bf.ModelError, match=r"tokens.*999"):
        model.detokenize([999])
    with pytest.raises(bf.DataError, match=r"text.*5"):
        model.tokenize(5)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "max_tokens=N"),
        ("stop_strings", "stop="),
        ("top_logprobs", "logprobs=N"),
        ("stream", "Model.stream"),
        ("enable_thinking", "chat_template_kwargs"),
        ("temprature", "'temperature'"),
    ],
)
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_arguments_of_other_libraries_get_a_hint(model, call, name, hint):
    with pytest.raises(bf.DataError, match=f"{name}.*{hint}"):
        getattr(model, call)("ab", **{name: 5})


def test_closing_a_model_frees_it(path):
    with bf.llm.load(path) as model:
        decoder, template = weakref.ref(model.decoder), weakref.ref(model.template)
        text = model.generate("ab", **HOW).text
    assert text
    gc.collect()
    assert decoder() is None
    assert template() is None
    for call in (model.generate, model.stream, model.tokenize, model.embed_text, model.encode):
        with pytest.raises(bf.ModelError, match=r"small llama.*closed"):
            call("ab")
    assert "closed" in repr(model)
    assert not hasattr(model, "nonsense")
    model.close()
