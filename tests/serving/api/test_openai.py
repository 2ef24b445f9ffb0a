"""The real client of OpenAI against a running server: each answer is what `generate` gives alone with the same seed."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import numpy as np
import pytest
from llm_models import Small, write_model
from serving_http import TOOLS_TEMPLATE, Running, serving

openai = pytest.importorskip("openai", reason="needs the package openai")

ASKED = [{"role": "user", "content": "abba"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"enum": [1, 2, 3]}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
UNENDING = {"logit_bias": {"1": -100}}  # the model's end is never chosen
# How tokens are chosen: fields of a request, which are arguments of `generate` too.
SETTINGS = [
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 0.8, "top_p": 0.7, "seed": 2},
    {"temperature": 1.5, "presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 1, "seed": 4, "logit_bias": {"70": 5, "1": -100}},
    {"temperature": 2, "seed": 5, "top_k": 5},
    {"temperature": 2, "seed": 6, "min_p": 0.2},
    {"temperature": 0, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / "small.gguf"
    write_model(file, Small(template=TOOLS_TEMPLATE, context=1024))
    with serving(file, streams=4, queue=16) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def alone(server: Running, prompt: object, raw: bool = False, **settings: object) -> str:
    settings["logit_bias"] = {int(token): bias for token, bias in settings.get("logit_bias", {}).items()}
    return "".join(server.model.generate(prompt, raw=raw, activations="exact", **settings))


DEFAULTS = {"temperature": 0.8, "top_p": 0.95}  # of a model whose files recommend nothing


def apart(settings: dict[str, object]) -> dict[str, object]:
    """The client has no arguments for the fields that OpenAI does not have."""
    more = {name: settings[name] for name in ("top_k", "min_p", "repetition_penalty") if name in settings}
    return {name: value for name, value in settings.items() if name not in more} | {"extra_body": more}


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_a_chat_is_what_generate_gives_alone(server, client, settings):
    found = client.chat.completions.create(model="small", messages=ASKED, max_tokens=12, **apart(settings))
    assert found.choices[0].message.content == alone(server, ASKED, max_tokens=12, **settings)
    assert found.choices[0].message.role == "assistant"
    assert found.usage.prompt_tokens == len(server.model.encode(ASKED))
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings))
def test_a_completion_is_what_generate_gives_alone(server, client, settings):
    found = client.completions.create(model="small", prompt="abba", max_tokens=12, **apart(settings))
    assert found.choices[0].text == alone(server, "abba", raw=True, max_tokens=12, **settings)


@pytest.mark.promise("server", "with `--activations exact` an answer does not depend on what else is served")
def test_answers_to_many_at_once_are_what_each_is_alone(server, client):
    prompts = [f"{i} ab" * (1 + i % 5) for i in range(16)]

    def ask(i: int) -> str:
        asked = [{"role": "user", "content": prompts[i]}]
        found = client.chat.completions.create(model="small", messages=asked, seed=i, max_completion_tokens=10)
        return found.choices[0].message.content

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(len(prompts))))
    assert answers == [alone(server, p, **DEFAULTS, seed=i, max_tokens=10) for i, p in enumerate(prompts)]


def test_a_stream_gives_the_same_text_and_then_the_usage(server, client):
    options = {"model": "small", "messages": ASKED, "seed": 7, "max_tokens": 20}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content is None
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {c.usage for c in chunks[:-1]} == {None}
    assert len({c.id for c in chunks}) == 1
    texts = client.completions.create(model="small", prompt="ab", seed=7, max_tokens=20, stream=True)
    assert "".join(c.choices[0].text for c in texts) == alone(server, "ab", raw=True, **DEFAULTS, seed=7, max_tokens=20)


def test_several_answers_have_seeds_in_order(server, client):
    found = client.chat.completions.create(model="small", messages=ASKED, seed=20, n=3, max_tokens=8)
    expected = [alone(server, ASKED, **DEFAULTS, seed=20 + i, max_tokens=8) for i in range(3)]
    assert [choice.message.content for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(model="small", messages=ASKED, seed=20, n=3, max_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == expected
    # Each of two prompts has two answers; a prompt is a text or tokens.
    prompts = [server.model.encode(p, raw=True) for p in ("ab", "ba")]
    found = client.completions.create(model="small", prompt=prompts, seed=20, n=2, max_tokens=8)
    expected = [
        alone(server, p, raw=True, **DEFAULTS, seed=20 + i, max_tokens=8) for p in ("ab", "ba") for i in range(2)
    ]
    assert [choice.text for choice in found.choices] == expected
    assert found.usage.prompt_tokens == sum(map(len, prompts))


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(server, client):
    text = alone(server, ASKED, max_tokens=30)
    stop = text[12:14]
    options = {"model": "small", "messages": ASKED, "temperature": 0, "max_tokens": 30, "stop": [stop, "no such text"]}
    found = client.chat.completions.create(**options)
    assert found.choices[0].message.content == text[: text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == text[: text.index(stop)]


def test_probabilities_of_a_chat(server, client):
    options = {"model": "small", "messages": ASKED, "max_tokens": 6, "logprobs": True, "top_logprobs": 3}
    options |= {"seed": 3, **UNENDING}
    found = client.chat.completions.create(**options).choices[0]
    entries = found.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace") == found.message.content
    tokens = server.model.encode(ASKED)
    scores = server.model.logits(tokens, activations="exact")[-1].astype(np.float64)
    expected = scores - np.logaddexp.reduce(scores)
    best = np.sort(expected)[::-1][:3]
    np.testing.assert_allclose([each.logprob for each in entries[0].top_logprobs], best, atol=1e-4)
    streamed = client.chat.completions.create(**options, stream=True)
    pieces = [c.choices[0].logprobs.content for c in streamed if c.choices[0].logprobs]
    assert [entry for piece in pieces for entry in piece] == entries


def test_probabilities_of_a_completion(client):
    found = client.completions.create(model="small", prompt="ab", seed=3, max_tokens=6, logprobs=2, **UNENDING).choices[
        0
    ]
    assert len(found.logprobs.tokens) == len(found.logprobs.token_logprobs) == len(found.logprobs.text_offset) == 6
    assert found.logprobs.text_offset[0] == 0
    for token, logprob, top in zip(
        found.logprobs.tokens, found.logprobs.token_logprobs, found.logprobs.top_logprobs, strict=True
    ):
        assert len(top) in (2, 3)
        assert top[token] == logprob
    assert all(logprob <= 0 for logprob in found.logprobs.token_logprobs)


def test_echo_begins_with_the_prompt(server, client):
    found = client.completions.create(model="small", prompt="ab<|user|>", temperature=0, max_tokens=5, echo=True)
    assert found.choices[0].text == "ab<|user|>" + alone(server, "ab<|user|>", raw=True, max_tokens=5)
    streamed = client.completions.create(
        model="small", prompt="ab<|user|>", temperature=0, max_tokens=5, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == found.choices[0].text


def test_json_and_json_of_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ab", "ba"]}, "right": {"type": "boolean"}},
        "required": ["name", "right"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in range(4):
        found = client.chat.completions.create(model="small", messages=ASKED, seed=seed, response_format=wanted)
        jsonschema.validate(json.loads(found.choices[0].message.content), schema)
        assert found.choices[0].finish_reason == "stop"
    found = client.chat.completions.create(
        model="small", messages=ASKED, seed=0, max_tokens=8, response_format={"type": "json_object"}
    )
    assert found.choices[0].message.content.lstrip().startswith("{")
    plain = client.chat.completions.create(
        model="small", messages=ASKED, temperature=0, max_tokens=5, response_format={"type": "text"}
    )
    assert plain.choices[0].finish_reason == "length"


def test_variables_of_the_chat_template(client):
    def prompt_tokens(**variables):
        body = {"chat_template_kwargs": variables}
        found = client.chat.completions.create(model="small", messages=ASKED, max_tokens=1, extra_body=body)
        return found.usage.prompt_tokens

    assert prompt_tokens(unknown=[1]) == prompt_tokens()
    assert prompt_tokens(add_generation_prompt=False) < prompt_tokens()
    with pytest.raises(openai.BadRequestError, match=r"chat_template_kwargs.*messages"):
        prompt_tokens(messages=[])


def test_a_function_that_must_be_called_is(server, client):
    found = client.chat.completions.create(
        model="small",
        messages=ASKED,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=1,
    ).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    (call,) = found.message.tool_calls
    assert call.function.name in ("weather", "clock")
    named = {"type": "function", "function": {"name": "weather"}}
    options = {"model": "small", "messages": ASKED, "tools": [WEATHER, CLOCK], "tool_choice": named, "seed": 1}
    (call,) = client.chat.completions.create(**options).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    deltas = [c.choices[0] for c in client.chat.completions.create(**options, stream=True)]
    streamed = [one.function for delta in deltas for one in delta.delta.tool_calls or []]
    assert streamed[0].name == "weather"
    assert len(streamed) > 2, "arguments come in pieces"
    assert "".join(one.arguments for one in streamed) == call.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    # The call and its result go back to the model.
    said = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
    ]
    after = client.chat.completions.create(model="small", messages=said, tools=[WEATHER], temperature=0, max_tokens=5)
    written = json.loads(call.function.arguments)
    rendered = server.model.template.render(
        [*ASKED, {"role": "assistant", "content": "", "tool_calls": [_as_object(call, written)]}, said[-1]],
        [{"type": "function", "function": {"name": "weather", "description": "", **WEATHER["function"]}}],
    )
    assert after.choices[0].message.content == alone(server, rendered, raw=True, max_tokens=5)


def test_a_function_whose_parameters_have_definitions(client):
    schema = {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Place"}},
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["sea", "land"]}},
    }
    travel = {"type": "function", "function": {"name": "travel", "parameters": schema}}
    for tools in ([travel], [CLOCK, travel]):
        choice = {"type": "function", "function": {"name": "travel"}} if len(tools) == 2 else "required"
        found = client.chat.completions.create(
            model="small", messages=ASKED, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=1
        )
        (call,) = found.choices[0].message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), schema)


def _as_object(call: object, arguments: object) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def test_functions_that_may_be_called_are_in_the_prompt(server, client):
    found = client.chat.completions.create(model="small", messages=ASKED, tools=[CLOCK], temperature=0, max_tokens=5)
    told = {"name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}
    rendered = server.model.template.render(ASKED, [{"type": "function", "function": told}])
    assert found.choices[0].message.content == alone(server, rendered, raw=True, max_tokens=5)
    none = client.chat.completions.create(
        model="small", messages=ASKED, tools=[CLOCK], tool_choice="none", temperature=0, max_tokens=5
    )
    assert none.choices[0].message.content == alone(server, ASKED, max_tokens=5)


def test_parts_of_a_message_are_one_text(server, client):
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "ba"}]
    found = client.chat.completions.create(
        model="small",
        messages=[{"role": "developer", "content": "b"}, {"role": "user", "content": parts}],
        temperature=0,
        max_tokens=5,
    )
    asked = [{"role": "system", "content": "b"}, {"role": "user", "content": "abba"}]
    assert found.choices[0].message.content == alone(server, asked, max_tokens=5)


def test_a_prompt_that_was_there_is_counted_as_cached(client):
    options = {"model": "small", "prompt": "ab ba " * 12, "temperature": 0, "max_tokens": 2}
    client.completions.create(**options)
    again = client.completions.create(**options).usage
    assert 16 <= again.prompt_tokens_details.cached_tokens < again.prompt_tokens


def test_cached_tokens_are_counted_where_a_stop_text_ends_the_answer(client):
    """The front ends it then, before the engine has said its last."""
    options = {"model": "small", "prompt": "ab ba " * 12, "temperature": 0, "max_tokens": 200}
    text = client.completions.create(**options).choices[0].text
    stopped = client.completions.create(**options, stop=text[2:6])
    assert (stopped.choices[0].finish_reason, stopped.choices[0].text) == ("stop", text[: text.index(text[2:6])])
    assert stopped.usage.completion_tokens < 100
    assert 16 <= stopped.usage.prompt_tokens_details.cached_tokens < stopped.usage.prompt_tokens


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_embeddings_are_those_of_embed_text(server, client, encoding):
    options = {} if encoding is None else {"encoding_format": encoding}
    found = client.embeddings.create(model="small", input=["ab", "b a<|user|>"], **options)
    for index, text in enumerate(["ab", "b a<|user|>"]):
        vector = found.data[index].embedding
        if encoding == "base64" and isinstance(vector, str):
            vector = np.frombuffer(__import__("base64").b64decode(vector), "<f4")
        np.testing.assert_array_equal(np.float32(vector), server.model.embed_text(text))
    assert found.usage.prompt_tokens == sum(
        len(server.model.tokenizer.encode(text, special=False)) for text in ("ab", "b a<|user|>")
    )


def test_the_models(client):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").owned_by == "billfish"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("large")
    assert caught.value.code == "model_not_found"
    other = client.chat.completions.with_raw_response.create(model="large", messages=ASKED, max_tokens=1)
    assert other.headers["x-billfish-model"] == other.parse().model == "small"
    assert "x-billfish-model" not in client.models.with_raw_response.list().headers
