"""Calls of functions: how templates write them, and how they are read from answers, whole and in pieces."""

from __future__ import annotations

import json

import jsonschema
import pytest
from serving_http import TOOLS_TEMPLATE

from billfish.llm.chat_template import ChatTemplate
from billfish.serving.api.request_bodies import Refusal
from billfish.serving.api.tool_calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    Call,
    Form,
    Function,
    FunctionName,
    NamedTool,
    Tool,
    ToolChoice,
    Tools,
    form_of,
    read_tools,
)

NO_TOOLS = "{% for message in messages %}{{ message.content }}{% endfor %}"
# As the models' own: Mistral has a list behind a mark, Llama 3 an object whose arguments are called parameters.
WRITTEN = {
    MISTRAL: "{% if message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{{ call.function | tojson }}{% endfor %}]{% endif %}",
    LLAMA: "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}{% endif %}',
}
A = '{"name": "f", "arguments": {"x": 1}}'
B = '{"name": "g", "arguments": {}}'
P = '{"name": "f", "parameters": {"x": "é"}}'


@pytest.mark.parametrize("form", WRITTEN)
def test_the_form_is_the_templates(form):
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}{{ message.content }}"
        + WRITTEN[form]
        + "{% endfor %}"
    )
    assert form_of(ChatTemplate(source)) == form


def test_templates_with_marks_and_without_tools():
    assert form_of(ChatTemplate(TOOLS_TEMPLATE, bos_token="")) == HERMES
    assert form_of(ChatTemplate(NO_TOOLS)) is None
    assert form_of(ChatTemplate("{{ tools[0].nothing.there }}")) is None
    for own in ("<function_call>", "<tool_call><function=probe></tool_call>", '[TOOL_CALLS]probe[ARGS]{"a": 1}'):
        assert form_of(ChatTemplate("{% if tools %}{{ tools }}{% endif %}" + own)) is None


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        (HERMES, "plain text", ["plain text"]),
        (HERMES, f"<tool_call>\n{A}\n</tool_call>", [("f", {"x": 1})]),
        (HERMES, f"Let me see.\n<tool_call>{A}</tool_call>\n<tool_call>{B}</tool_call>", ["Let me see.", "f", "g"]),
        (HERMES, f"<tool_call>{A}", ["f"]),  # without its end
        (HERMES, f"<tool_call>{A}</tool_call> Done.", ["f", "Done."]),
        (HERMES, "<tool_call>{broken</tool_call>", ["<tool_call>{broken</tool_call>"]),
        (HERMES, '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
        (HERMES, "2 <tool", ["2 <tool"]),
        (HERMES, "<tool_call>" + "[" * 100000, ["<tool_call>" + "[" * 100000]),
        (MISTRAL, f"[TOOL_CALLS] [{A}, {B}]", ["f", "g"]),
        (MISTRAL, f"[{A}]", ["f"]),  # the mark is a control token, which adds nothing to the text
        (MISTRAL, "[TOOL] is a word", ["[TOOL] is a word"]),
        (MISTRAL, "a [TOOL_CALLS]", ["a [TOOL_CALLS]"]),
        (LLAMA, f" {P} ", [("f", {"x": "é"})]),
        (LLAMA, "Hello {", ["Hello {"]),
        (LLAMA, "{a: 5}", ["{a: 5}"]),
        (LLAMA, A, [A]),  # another form's
        (LLAMA, "", []),
        (LLAMA, "[]", ["[]"]),
    ],
)
def test_calls_are_read_from_any_pieces(form, text, found):
    for size in (1, 3, 7, 10**6) if len(text) < 1000 else (10**6,):
        read = _read(form, [text[i : i + size] for i in range(0, len(text), size)])
        assert len(read) == len(found), (size, read)
        for got, expected in zip(read, found, strict=True):
            if isinstance(got, Call):
                name, arguments = expected if isinstance(expected, tuple) else (expected, json.loads(got.arguments))
                assert (got.name, json.loads(got.arguments)) == (name, arguments)
            else:
                assert got == expected


def _read(form: Form, pieces: list[str]) -> list[str | Call]:
    """What a reader gives, with neighbouring texts joined."""
    reader = form.reader()
    parts = [part for piece in pieces for part in reader.read(piece)] + list(reader.finish())
    joined: list[str | Call] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(part)
    return [part.strip() if form == HERMES and isinstance(part, str) else part for part in joined]


def test_ids_are_what_every_template_takes():
    ids = {Call("f", "{}").id for _ in range(50)}
    assert len(ids) == 50
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_text_is_streamed_as_it_comes():
    """Until it may be a call, and no further."""
    for form, pieces in (
        (HERMES, ["Hello", " world", ". <"]),
        (MISTRAL, ["Hello", " world", ". ["]),
        (LLAMA, ["Hello", " world", ". {"]),
    ):
        reader = form.reader()
        read = ["".join(map(str, reader.read(piece))) for piece in pieces]
        assert read[:2] == pieces[:2], form


def named(name: str) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=name))


def tools(choice: ToolChoice | None, *functions: Function) -> Tools:
    read = read_tools([Tool(type="function", function=function) for function in functions], choice)
    assert read is not None
    return read


F, G = Function(name="f"), Function(name="g")


def test_the_schema_of_a_call_is_in_the_form_of_the_model():
    one = tools(named("g"), F, G).schema(HERMES)
    assert one["properties"]["name"] == {"const": "g"}
    both = tools("required", F, G).schema(LLAMA)["anyOf"]
    assert [each["properties"]["name"]["const"] for each in both] == ["f", "g"]
    assert "parameters" in tools(named("f"), F).schema(LLAMA)["properties"]
    assert tools(named("f"), F).schema(MISTRAL)["type"] == "array"


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_function_may_be_called_like_a_choice(name):
    odd = Function(name=name)
    read = tools(named(name), F, odd)
    assert read.forced
    assert read.schema(HERMES)["properties"]["name"] == {"const": name}
    assert not tools("auto", F, odd).forced
    assert len(tools("required", F, odd).callable) == 2
    assert read_tools([Tool(type="function", function=odd)], "none") is None
    with pytest.raises(Refusal, match="tool_choice"):
        tools(named(name), F)


REFERRING = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Place"}, "const": {"$ref": "#/$defs/Place"}, "next": {"$ref": "#"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": [{"$ref": "#/x"}, "sea"]}},
}


@pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA])
def test_references_of_parameters_lead_to_their_own_definitions(form):
    """Pydantic makes such schemas."""
    other = Function(name="other", parameters={"type": "object", "$defs": {"Place": {"type": "null"}}})
    for read in (tools("required", other, Function(name="go", parameters=REFERRING)), tools("required", other)):
        schema = read.schema(form)
        for call, valid in (
            ({"name": "go", form.arguments: {"at": "sea", "next": {"at": {"$ref": "#/x"}}}}, len(read.callable) == 2),
            ({"name": "go", form.arguments: {"at": None}}, False),
            ({"name": "go", form.arguments: {"at": "sea", "const": "land"}}, False),
            ({"name": "other", form.arguments: {}}, True),
        ):
            answer = [call] if form.listed else call
            assert jsonschema.Draft202012Validator(schema).is_valid(answer) == valid, call
