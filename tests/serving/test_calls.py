"""Calls of functions: how templates write them, and how they are read from answers, whole and in pieces."""

from __future__ import annotations

import json

import pytest
from serving_http import TOOLS_TEMPLATE

from billfish.llm.chat_template import ChatTemplate
from billfish.serving.calls import HERMES, LLAMA, MISTRAL, Call, Form, form_of
from billfish.serving.tools import Tools

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


def test_the_schema_of_a_call_is_in_the_form_of_the_model():
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    one = Tools(tools, "g").schema(HERMES)
    assert one["properties"]["name"] == {"const": "g"}
    assert [each["properties"]["name"]["const"] for each in Tools(tools, "required").schema(LLAMA)["anyOf"]] == [
        "f",
        "g",
    ]
    assert "parameters" in Tools(tools, "f").schema(LLAMA)["properties"]
    assert Tools(tools, "f").schema(MISTRAL)["type"] == "array"
