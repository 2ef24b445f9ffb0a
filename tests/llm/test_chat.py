"""`Model.chat` says what the server says: functions, thoughts and schemas by the same code."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from llm_models import Small, write_model
from serving_http import TOOLS_TEMPLATE, send, serving

from billfish.core.errors import DataError
from billfish.llm import load
from billfish.llm.chat_answer import ChatAnswer
from billfish.llm.conversation.reader import AnswerReader
from billfish.llm.conversation.syntax import HERMES, ChatSyntax, Marks, ThoughtSyntax

USER = {"role": "user", "content": "ab"}
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "words", "parameters": PARAMETERS, "strict": True}}
    for name in ("turn", "auto")
]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": PARAMETERS}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "turn", "arguments": '{"on": true}'}}
PARTS = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
PAST = [
    {"role": "system", "content": "be short"},
    USER,
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "text", "text": "done"}]},
]


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tools.gguf"
    write_model(path, Small(context=2048, template=TOOLS_TEMPLATE))
    with serving(path, streams=1) as running:
        yield running


@pytest.mark.parametrize(
    "asked",
    [
        {"messages": [USER]},
        {"messages": PAST, "tools": TOOLS},
        {"messages": [USER, {"role": "assistant", "content": PARTS}, USER]},
        {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": PAST, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "auto"}}},
        {"messages": [USER], "tools": TOOLS, "tool_choice": "none"},
        {"messages": [USER], "tools": TOOLS, "tool_choice": allowed("turn")},
        {"messages": [USER], "tools": TOOLS, "tool_choice": allowed("auto", mode="required")},
        {"messages": [USER], "stop": ""},
        {"messages": [USER], "response_format": SCHEMA},
        {"messages": [USER], "stop": ["e", "a"], "seed": 3, "temperature": 0.9},
        {"messages": [USER], "reasoning_effort": "none", "chat_template_kwargs": {"further": 1}},
    ],
)
def test_the_answer_is_the_servers(server, asked):
    """Whole and streamed."""
    body = {"temperature": 0, "top_p": 1, "max_tokens": 40, **asked}
    code, _, answer = send(server.url, "/v1/chat/completions", body)
    assert code == 200, answer
    [choice] = answer["choices"]
    settings = {name: value for name, value in body.items() if name not in ("messages", "top_p")}
    found = server.model.chat(body["messages"], activations="exact", **settings)
    expected = choice["message"]
    assert (found.content or None) == (expected["content"] or None)
    assert found.reasoning_content == expected.get("reasoning_content", "")
    assert [call["function"] for call in found.tool_calls] == [
        call["function"] for call in expected.get("tool_calls", [])
    ]
    assert found.finish_reason == choice["finish_reason"]
    assert found.generation.prompt_tokens == answer["usage"]["prompt_tokens"]
    deltas = list(server.model.chat_stream(body["messages"], activations="exact", **settings))
    assert "".join(delta.get("content", "") for delta in deltas) == found.content
    pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(piece["arguments"] for piece in pieces) == "".join(
        call["function"]["arguments"] for call in found.tool_calls
    )


def test_calls_are_those_that_were_asked_for(server):
    for some in (["auto"], ["turn"], [tool["function"]["name"] for tool in TOOLS]):
        how = {"tool_choice": allowed(*some, mode="required"), "max_tokens": 60, "parallel_tool_calls": False}
        [call] = server.model.chat([USER], tools=TOOLS, **how).tool_calls
        assert call["function"]["name"] in some
    none, untold = (server.model.chat([USER], tools=TOOLS, tool_choice=c, max_tokens=4) for c in (allowed(), "none"))
    assert none.message == untold.message
    assert none.generation.prompt_tokens == untold.generation.prompt_tokens
    choice = {"type": "function", "function": {"name": "auto"}}
    answer = server.model.chat([USER], tools=TOOLS, tool_choice=choice, max_tokens=60)
    [call] = answer.tool_calls
    assert call["function"]["name"] == "auto"
    assert set(json.loads(call["function"]["arguments"])) == {"on"}
    assert answer.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    again = server.model.chat([USER, answer.message, result], tools=TOOLS, max_tokens=4)
    assert again.generation.prompt_tokens > answer.generation.prompt_tokens


def test_thoughts_are_apart_from_the_text(server):
    """From a model that writes what a test says."""
    syntax = ChatSyntax(thought=ThoughtSyntax(Marks("<think>", "</think>")), calls=HERMES)

    class Written:
        finish_reason = None

        def __init__(self, text):
            self.pieces = iter([text[at : at + 3] for at in range(0, len(text), 3)])

        def __next__(self):
            try:
                return next(self.pieces)
            except StopIteration:
                self.finish_reason = "stop"
                raise

    said = '<think>one two</think>three<tool_call>{"name": "turn", "arguments": {"on": true}}</tool_call>'
    answer = ChatAnswer(Written(said), AnswerReader(syntax, {"turn": PARAMETERS}))
    deltas = list(answer)
    assert (answer.reasoning_content, answer.content, answer.finish_reason) == ("one two", "three", "tool_calls")
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "one two"
    assert answer.message["tool_calls"][0]["function"]["name"] == "turn"
    assert answer.message["reasoning_content"] == "one two"


def test_an_event_loop_stays_free(server):
    async def both():
        answer = await server.model.chat_async([USER], max_tokens=6)
        return answer.content, [delta async for delta in server.model.chat_stream([USER], max_tokens=6)]

    text, deltas = asyncio.run(both())
    assert "".join(delta["content"] for delta in deltas) == text == server.model.chat([USER], max_tokens=6).content


def test_a_cache_and_log_probabilities_go_on(server):
    cache = server.model.cache()
    first = server.model.chat([USER], max_tokens=4, cache=cache, logprobs=2)
    assert len(first.generation.logprobs) == len(first.generation.tokens)
    second = server.model.chat([USER, first.message, USER], max_tokens=4, cache=cache)
    assert second.generation.reused_tokens > 0


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"messages": "ab"}, "messages"),
        ({"messages": 7}, "messages is 7; expected a list of"),
        ({"messages": []}, "messages is []"),
        ({"messages": ["ab"]}, "messages[0] is 'ab'; expected a dict with role and content"),
        ({"messages": [USER], "tools": None}, "tools is None; expected a list"),
        ({"messages": [USER], "tools": TOOLS[0]}, "tools is {"),
        ({"messages": [USER], "chat_template_kwargs": 5}, "chat_template_kwargs is 5"),
        ({"messages": [{"role": "other", "content": ""}]}, "messages[0].role"),
        ({"messages": [USER], "tools": [{"name": "turn"}]}, "tools[0]"),
        ({"messages": [USER], "tools": [TOOLS[0], TOOLS[0]]}, "same name"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "other"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": allowed("turn", "other")}, "other"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": allowed(mode="required")}, "tool_choice allows none"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": allowed("turn", mode="none")}, "allowed_tools"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "allowed_tools"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": [USER], "reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [USER], "raw": True}, "raw"),
        ({"messages": [USER], "max_token": 3}, "max_tokens"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content is None; expected a string, or a list of parts"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        ({"messages": [{"role": "assistant", "content": {}}]}, "messages[0].content is {}"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0] is 'x'; expected a part"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]}, "content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "messages[0].content[1] is {'type': 'image_url'",
        ),
        ({"messages": [{**USER, "name": 5}]}, "messages[0].name is 5"),
        ({"messages": [{**PAST[2], "reasoning_content": ["a"]}]}, "messages[0].reasoning_content is ['a']"),
        ({"messages": [{**PAST[3], "tool_call_id": 5}]}, "messages[0].tool_call_id is 5"),
        ({"messages": [{**PAST[2], "tool_calls": 5}]}, "messages[0].tool_calls is 5"),
        ({"messages": [{**PAST[2], "tool_calls": ["a"]}]}, "messages[0].tool_calls[0] is 'a'"),
        (
            {"messages": [{**PAST[2], "tool_calls": [{"id": "a"}]}]},
            "messages[0].tool_calls[0] is {'id': 'a'}; expected",
        ),
        ({"messages": [{**PAST[2], "tool_calls": [{"function": {"name": 5}}]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{**PAST[2], "tool_calls": [{**CALL, "id": 5}]}]}, "messages[0].tool_calls[0].id is 5"),
        ({"messages": [USER], "tools": [{"function": {"name": "a", "parameters": 5}}]}, "tools[0]"),
        (
            {"messages": [{**PAST[2], "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "["}}]}]},
            "tool_calls",
        ),
    ],
)
def test_what_is_wrong_is_named(server, asked, named):
    with pytest.raises(DataError) as error:
        server.model.chat(**asked)
    assert named in str(error.value)


def test_a_model_without_a_template_says_so(tmp_path):
    write_model(tmp_path / "plain.gguf", Small(template=""))
    with load(tmp_path / "plain.gguf") as model, pytest.raises(DataError, match="no chat template"):
        model.chat([USER])
