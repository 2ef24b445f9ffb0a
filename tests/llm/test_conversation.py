"""How templates write thoughts and calls, how both are read from answers, and grammars of answers that must call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import TEMPLATES

from billfish.llm import default_model
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.conversation.answer_grammar import Function, Wanted, answer_grammar
from billfish.llm.conversation.choose_reader import reader_of
from billfish.llm.conversation.derive import derive
from billfish.llm.conversation.events import AnswerMessage, CallArguments, Text
from billfish.llm.conversation.literals import Literals, NotALiteral, typed
from billfish.llm.conversation.reader import AnswerReader
from billfish.llm.conversation.syntax import HERMES, CallSyntax, ChatSyntax, Marks
from billfish.llm.grammar import Vocabulary, compile_grammar

USER = {"role": "user", "content": "asked"}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days", "on", "tags"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("weather", PARAMETERS, "words"), Function("other", PARAMETERS, "words")]
ARGUMENTS = [
    {"city": "São Paulo, two", "days": 3, "on": True, "tags": ["a", "b"]},
    {"city": "Bonn", "days": -1, "on": False, "tags": []},
]
TOOLS = [{"type": "function", "function": {"name": f.name, "parameters": PARAMETERS}} for f in FUNCTIONS]
# style, trigger, thought, whether two calls are written
EXPECTED = {
    "qwen2.5": ("json", "<tool_call>", None, True),
    "qwen3": ("json", "<tool_call>", ("<think>", "</think>"), True),
    "qwen3-thinking": ("json", "<tool_call>", ("<think>", "</think>"), True),
    "qwen3-coder": ("tagged", "<tool_call>\n<function=", None, True),
    "qwen3.5": ("tagged", "<tool_call>\n<function=", ("<think>", "</think>"), True),
    "granite4": ("json", "<tool_call>", None, True),
    "llama3": ("json", "", None, False),
    "mistral-nemo": ("json", "[TOOL_CALLS]", None, True),
    "mistral-small": ("json", "[TOOL_CALLS]", None, True),
    "ministral-3-reasoning": ("json", "[TOOL_CALLS]", ("[THINK]", "[/THINK]"), True),
    "glm4.6": ("tagged", "<tool_call>", ("<think>", "</think>"), True),
    "minimax-m2": ("tagged", "<minimax:tool_call>", ("<think>", "</think>"), True),
    "seed-oss": ("tagged", "<seed:tool_call>\n<function=", ("<seed:think>", "</seed:think>"), True),
    "lfm2.5": ("literal", "<|tool_call_start|>[", ("<think>", "</think>"), True),
    "gemma4": ("literal", "<|tool_call>call:", ("<|channel>thought", "<channel|>"), True),
}
UNTOLD = {
    "granite3": "<|tool_call|>",
    "lfm2": "<|tool_call_start|>[",
    "smollm2": "<tool_call>",
    "gemma3": "<tool_call>",
}


@pytest.fixture(scope="module")
def derived() -> dict[str, tuple[ChatTemplate, ChatSyntax]]:
    templates = {name: ChatTemplate(source, bos_token="<s>", eos_token="</s>") for name, source in TEMPLATES.items()}
    return {name: (template, derive(template)) for name, template in templates.items()}


def read(syntax: ChatSyntax, text: str, size: int = 10**6, prompt: str = "", **options: Any) -> AnswerMessage:
    """The message that a reader makes of a text in pieces."""
    reader, message = reader_of(syntax, prompt, {f.name: PARAMETERS for f in FUNCTIONS}, **options), AnswerMessage()
    for start in range(0, len(text), size):
        for event in reader.read(text[start : start + size]):
            message.add(event)
    for event in reader.finish():
        message.add(event)
    return message


def written(template: ChatTemplate, syntax: ChatSyntax, count: int) -> tuple[str, str]:
    """The prompt, and the calls as the template writes them behind it."""
    calls = [
        {"id": f"12345678{i}", "type": "function", "function": {"name": FUNCTIONS[i].name, "arguments": ARGUMENTS[i]}}
        for i in range(count)
    ]
    whole = template.render(
        [USER, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS, add_generation_prompt=False
    )
    behind = whole.rpartition(USER["content"])[2]
    text = behind[behind.index((syntax.calls.trigger.split() or ["{"])[0]) :]
    for end in ("<|im_end|>\n", "<|end_of_text|>\n", "<|eot_id|>", "</s>", "[e~[\n", "<seed:eos>"):
        text = text.removesuffix(end)
    return template.render([USER], TOOLS), text


@pytest.mark.parametrize("name", EXPECTED)
def test_the_syntax_is_the_templates(derived, name):
    style, trigger, thought, several = EXPECTED[name]
    _, syntax = derived[name]
    assert (syntax.calls.style, syntax.calls.trigger) == (style, trigger)
    found = syntax.thought and (syntax.thought.marks.start.strip(), syntax.thought.marks.end.strip())
    assert found == thought
    assert (syntax.calls.separator is not None) == several
    assert syntax.tells_tools
    assert syntax.writes_calls
    assert syntax.takes_results
    assert not syntax.text_arguments


def test_the_details_of_some_syntaxes(derived):
    assert derived["qwen2.5"][1].calls == HERMES
    assert derived["llama3"][1].calls.arguments_key == "parameters"
    assert (derived["mistral-nemo"][1].calls.listed, derived["mistral-nemo"][1].calls.id_key) == (True, "id")
    assert derived["minimax-m2"][1].calls.key == Marks('\n<parameter name="', '">')
    assert derived["gemma4"][1].calls.quote == '<|"|>'
    assert derived["lfm2.5"][1].thought.fields == ("thinking",)
    assert derived["ministral-3-reasoning"][1].thought.fields == ("content",)
    assert derived["gpt-oss"][1].harmony


@pytest.mark.parametrize("name", UNTOLD)
def test_templates_that_do_not_tell_how_calls_are_written(derived, name):
    _, syntax = derived[name]
    assert syntax.calls.trigger == UNTOLD[name]
    assert not syntax.writes_calls
    assert syntax.tells_tools == (name in ("granite3", "lfm2"))
    assert syntax.takes_system == (name != "gemma3")
    assert syntax.takes_results == (name != "gemma3")


def test_a_template_that_wants_the_system_first():
    late = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    )
    syntax = derive(ChatTemplate(late + "{{ m.content }}{% endfor %}"))
    assert syntax.takes_system
    assert not syntax.takes_late_system
    assert derive(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")).takes_late_system


def test_arguments_as_texts():
    """DeepSeek's templates add them to texts."""
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ '<call>' + call.function.name + '<sep>' + call.function.arguments }}"
        "</call>{% endfor %}{% endfor %}"
    )
    syntax = derive(ChatTemplate(source))
    assert syntax.text_arguments
    assert (syntax.calls.style, syntax.calls.trigger, syntax.calls.name_end) == ("json", "<call>", "<sep>")


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_are_read_as_the_template_writes_them(derived, name):
    template, syntax = derived[name]
    for count in (1, 2) if syntax.calls.separator is not None else (1,):
        _, text = written(template, syntax, count)
        for size in (1, 3, 10, 10**6):
            message = read(syntax, text, size)
            assert [call.name for call in message.calls] == [f.name for f in FUNCTIONS[:count]], (size, text)
            assert [json.loads(call.arguments) for call in message.calls] == ARGUMENTS[:count]
            assert message.text == message.thought == ""
    one = read(syntax, written(template, syntax, count)[1], 4, parallel=False)
    assert len(one.calls) == 1


@pytest.mark.parametrize("name", EXPECTED)
def test_a_call_that_is_cut_behind_another_is_no_text(derived, name):
    """By max_tokens, at any place."""
    template, syntax = derived[name]
    if syntax.calls.separator is None:
        pytest.skip("an answer of this model has one call")
    _, text = written(template, syntax, 2)
    counts = list[int]()
    for end in range(1, len(text)):
        message = read(syntax, text[:end], 3)
        counts.append(len(message.calls))
        assert not message.calls or message.text == "", text[:end]
    assert {0, 1, 2} == {*counts}


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected[2]])
def test_thoughts_are_apart_from_text(derived, name):
    _, syntax = derived[name]
    start, end = syntax.thought.marks.start, syntax.thought.marks.end
    for text in (f"{start}\nmaybe < so\n{end}The answer < 5.", f"\n{start}maybe < so{end}\n\nThe answer < 5."):
        for size in (1, 7, 10**6):
            assert read(syntax, text, size) == AnswerMessage("The answer < 5.", "maybe < so")
    opened = f"a prompt\n{start}"
    assert read(syntax, f"maybe{end}Yes.", 3, opened) == AnswerMessage("Yes.", "maybe")
    assert read(syntax, "maybe so", 3, opened) == AnswerMessage("", "maybe so")
    assert read(syntax, f"No {start.strip()} thought.", 2) == AnswerMessage(f"No {start.strip()} thought.")


def test_the_channels_of_harmony(derived):
    _, syntax = derived["gpt-oss"]
    text = (
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Bonn"}'
    )
    for size in (1, 9, 10**6):
        message = read(syntax, text, size, "<|start|>assistant")
        assert message.thought == "So."
        assert [(call.name, call.arguments) for call in message.calls] == [("weather", '{"city": "Bonn"}')]
    final = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes < no."
    assert read(syntax, final, 2, "<|start|>assistant") == AnswerMessage("Yes < no.", "So.")


CALL = '{"name": "weather", "arguments": {"city": "Bonn"}}'
PLAIN = ChatSyntax()
LLAMA = ChatSyntax(calls=CallSyntax("json", name_key="name", arguments_key="parameters"))


@pytest.mark.parametrize(
    ("syntax", "text", "names", "left"),
    [
        (PLAIN, "plain text", [], "plain text"),
        (PLAIN, f"Let me see.\n<tool_call>{CALL}</tool_call>", ["weather"], "Let me see."),
        (PLAIN, f"<tool_call>{CALL}", ["weather"], ""),  # without its end
        (PLAIN, f"<tool_call>{CALL}</tool_call> Done.", ["weather"], "Done."),
        (PLAIN, "<tool_call>{broken</tool_call>", [], "<tool_call>{broken</tool_call>"),
        (PLAIN, '<tool_call>{"name": 5}</tool_call>', [], '<tool_call>{"name": 5}</tool_call>'),
        (PLAIN, "2 <tool", [], "2 <tool"),
        (PLAIN, "<tool_call>" + "[" * 1000, [], "<tool_call>" + "[" * 1000),
        (PLAIN, '<tool_call>{"arguments": {}, "name": "weather"}</tool_call>', ["weather"], ""),
        (PLAIN, '<tool_call>{"name": "weather"}</tool_call>', ["weather"], ""),
        (LLAMA, ' {"name": "weather", "parameters": {"city": "é"}} ', ["weather"], ""),
        (LLAMA, '{"name": "Bob", "parameters": {}}', [], '{"name": "Bob", "parameters": {}}'),  # no function
        (LLAMA, "Hello {", [], "Hello {"),
        (LLAMA, "{a: 5}", [], "{a: 5}"),
        (LLAMA, "", [], ""),
    ],
)
def test_what_is_no_call_is_text(syntax, text, names, left):
    for size in (1, 3, 10**6):
        message = read(syntax, text, size)
        assert [call.name for call in message.calls] == names, (size, message)
        assert message.text.strip() == left
        assert all(isinstance(json.loads(call.arguments), dict) for call in message.calls)


def test_text_and_arguments_go_out_as_they_come():
    for syntax in (PLAIN, LLAMA):
        reader = AnswerReader(syntax, {"weather": {}})
        assert [list(reader.read(piece)) for piece in ("Hello", " you", ". <")][:2] == [[Text("Hello")], [Text(" you")]]
    reader = AnswerReader(PLAIN, {"weather": {}})
    list(reader.read('<tool_call>{"name": "weather", "arguments": {"city": '))
    assert list(reader.read('"Bo')) == [CallArguments(0, '"Bo')]


def test_a_call_ends_the_thought_before_it():
    syntax = derive(ChatTemplate(TEMPLATES["qwen3"]))
    message = read(syntax, f"<think>\nI call.\n<tool_call>\n{CALL}\n</tool_call>", 5)
    assert (message.thought, [call.name for call in message.calls]) == ("I call.", ["weather"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1, b='x\\'y', c=[True, None], d={'k': 1.5})", {"a": 1, "b": "x'y", "c": [True, None], "d": {"k": 1.5}}),
        ('a="é\\n\\u00e9", b=-2)', {"a": "é\né", "b": -2}),
        (")", {}),
    ],
)
def test_literals(text, value):
    assert Literals(text + " rest", "=", '"').arguments(")") == (value, len(text))
    for end in range(len(text)):
        assert Literals(text[:end], "=", '"').arguments(")") is None
    for wrong in ("a)", "a=b)", "=1)", "a=1 b=2)", "a=" + "[" * 100):
        with pytest.raises(NotALiteral):
            Literals(wrong + " ", "=", '"').arguments(")")


def test_raw_values_have_the_type_of_their_schema():
    for text, schema, value in (
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("True", {"type": "boolean"}, True),
        ("['a']", {"type": "array"}, ["a"]),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("[1]", None, [1]),
        ("some words", None, "some words"),
        ("007", {"enum": ["007", "008"]}, "007"),
    ):
        assert typed(text, schema) == value


# ---- grammars -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    """A real vocabulary."""
    from billfish.llm.model_files import open_source

    pytest.importorskip("llguidance", reason="needs billfish[serve]")
    tokenizer = open_source(default_model()).tokenizer()
    return tokenizer, Vocabulary(tokenizer, len(tokenizer.pieces))


def accepted(smollm2: Any, grammar: Any, text: str) -> bool:
    """Whether a text is a whole answer of the grammar."""
    tokenizer, vocabulary = smollm2
    matcher = compile_grammar(grammar, vocabulary).matcher()
    for token in tokenizer.encode(text, special=False, start=False):
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return matcher.complete or bool(matcher.allowed()[list(tokenizer.ends)].any())


@pytest.mark.model
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in ("lfm2.5", "mistral-nemo", "mistral-small")])
def test_a_forced_call_is_in_the_syntax_of_the_template(derived, smollm2, name):
    template, syntax = derived[name]
    for count in (1, 2) if syntax.calls.separator is not None else (1,):
        text = written(template, syntax, count)[1]
        text = text.replace("True", "true").replace("False", "false").replace("['a', 'b']", '["a", "b"]')
        text = text.removesuffix("<|tool_response>").rstrip("\n")
        thought = syntax.thought
        for parallel in (True, False):
            grammar = answer_grammar(syntax, Wanted(FUNCTIONS, "required", parallel), {}, thinking=False)
            assert accepted(smollm2, grammar, text) == (parallel or count == 1), text
            assert not accepted(smollm2, grammar, text.replace("weather", "wether"))
            assert not accepted(smollm2, grammar, "plain text")
        if thought:
            grammar = answer_grammar(syntax, Wanted(FUNCTIONS, "required"), {}, thinking=True)
            assert accepted(smollm2, grammar, f"So.{thought.marks.end.rstrip()}{text}")
            assert not accepted(smollm2, grammar, text)


@pytest.mark.model
def test_what_an_answer_may_be(derived, smollm2):
    strict = [Function("weather", PARAMETERS, strict=True)]
    call = "<tool_call>\n" + json.dumps({"name": "weather", "arguments": ARGUMENTS[1]}) + "\n</tool_call>"
    wrong = call.replace("-1", '"x"')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for wanted, right, refused in (
        (Wanted(strict, "auto"), ["text", call, f"text {call}"], [wrong, f"text {wrong}"]),
        (Wanted(strict, "auto", schema=schema), ['{"a": 1}', call], ["text", '{"a": "x"}']),
        (Wanted(schema=schema), ['{"a": 1}'], [call, "text"]),
        (Wanted([Function("weather", PARAMETERS)], "auto", held=True), ["text", call], [call.replace("weath", "oth")]),
    ):
        grammar = answer_grammar(PLAIN, wanted, {}, thinking=False)
        assert [text for text in right if not accepted(smollm2, grammar, text)] == []
        assert [text for text in refused if accepted(smollm2, grammar, text)] == []
    assert answer_grammar(PLAIN, Wanted(FUNCTIONS, "auto"), {}, thinking=False) is None
    llama = answer_grammar(LLAMA, Wanted(strict, "auto"), {}, thinking=False)
    assert accepted(smollm2, llama, "text")
    assert not accepted(smollm2, llama, '{"name": "weather", "parameters": {}}')


@pytest.mark.model
def test_control_tokens_are_tokens_in_a_grammar(derived, smollm2):
    tokenizer, vocabulary = smollm2
    control = {piece: i for i, piece in enumerate(tokenizer.pieces) if piece in ("<|im_start|>", "<|im_end|>")}
    syntax = ChatSyntax(calls=CallSyntax("json", call=Marks("<|im_start|>"), name_key="name"))
    grammar = answer_grammar(syntax, Wanted(FUNCTIONS[:1], "required"), control, thinking=False)
    allowed = compile_grammar(grammar, vocabulary).matcher().allowed()
    assert allowed.nonzero()[0].tolist() == [control["<|im_start|>"]]
