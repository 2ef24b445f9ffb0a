"""A conversation with functions, thoughts and schemas: how it becomes a prompt, a grammar and a reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from billfish.core.errors import DataError
from billfish.llm.chat_template import RESERVED
from billfish.llm.conversation.answer_grammar import Function, Mode, Wanted, answer_grammar
from billfish.llm.conversation.chat_texts import ChatTexts
from billfish.llm.conversation.choose_reader import has_thought, opens_thought, reader_of
from billfish.llm.conversation.events import Call
from billfish.llm.conversation.harmony import CHANNEL, END, MESSAGE, START
from billfish.llm.conversation.reader import Reader
from billfish.llm.conversation.syntax import ChatSyntax
from billfish.llm.conversation.write_calls import written_calls
from billfish.llm.grammar import Grammar, json_schema, text_grammar
from billfish.llm.thought_limit import ThoughtLimit

SWITCHES = ("enable_thinking", "thinking")  # variables of templates that turn thoughts on and off
OFF = ("none", "minimal")  # reasoning efforts that mean no thought
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}  # what templates know instead
TOLD = """You may call functions. They are described here in JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between marks, and nothing behind it:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


class FieldError(DataError):
    """A field of a conversation cannot be used."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def wrong(field: str, value: object, expected: str) -> FieldError:
    """For the value of a field."""
    return FieldError(field, f"{field} is {value}; expected {expected}.")


def cannot_be_used(field: str, error: DataError) -> FieldError:
    """For a schema. error: begins with the name of a call."""
    return FieldError(field, f"{field} cannot be used: {str(error).partition(': ')[2]}")


@dataclass(frozen=True)
class ToolChoice:
    """mode: whether a function may, must or must not be called. name: the one that must; a name is no mode, so that a
    function may be called "auto". allowed: the only ones that may, of all that the model is told of; None: any."""

    mode: Mode = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    def allows(self, name: str) -> bool:
        """Whether a function may be called."""
        return self.mode != "none" and self.name in (None, name) and (self.allowed is None or name in self.allowed)


@dataclass(frozen=True)
class Turn:
    """A message. text: of its content. thought, calls: of an assistant's. result_of: the id of the call that a tool's
    message answers."""

    role: str
    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    result_of: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Conversation:
    """What is asked of a model. place: the field that has the messages. tools_place: the one that has the functions.
    schema: of the answer, and the field that says so. text_grammar: of the answer, in GBNF or Lark, instead.
    effort: of reasoning. thought_budget: tokens of thoughts, at most; None or -1 is no limit. variables: further ones
    for the template. goes_on: the last message is the beginning of the answer. begins: the prompt ends with what begins
    an assistant's message."""

    turns: Sequence[Turn]
    _: KW_ONLY
    place: str = "messages"
    functions: Sequence[Function] = ()
    tools_place: str = "tools"
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    schema: tuple[Mapping[str, Any], str] | None = None
    text_grammar: tuple[str, str] | None = None
    effort: str | None = None
    thought_budget: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    begins: bool = True

    @property
    def callable(self) -> list[Function]:
        """The functions that the answer may call."""
        return [each for each in self.functions if self.choice.allows(each.name)]


@dataclass(frozen=True)
class Prepared:
    """text: of the prompt. grammar: of the answer, and the field that says so. shown: control tokens that are text for
    the reader. schemas: of the functions that may be called. parallel: whether several may be."""

    text: str
    grammar: tuple[Grammar, str] | None
    shown: frozenset[int]
    schemas: Mapping[str, dict[str, Any]]
    parallel: bool
    syntax: ChatSyntax
    thought: ThoughtLimit | None = None

    def reader(self) -> Reader:
        """For one answer."""
        return reader_of(self.syntax, self.text, self.schemas, parallel=self.parallel)


def prepare_chat(texts: ChatTexts, asked: Conversation) -> Prepared:
    """Make the prompt and all else that an answer needs. Raises FieldError."""
    _check_choice(asked)
    syntax = texts.syntax
    text = render(texts, asked)
    functions = asked.callable
    mode: Mode = ("required" if asked.choice.name else asked.choice.mode) if functions else "none"
    grammar = None if asked.goes_on else _grammar(texts, asked, functions, mode, text)
    shown = texts.marks if functions or syntax.thought is not None or syntax.harmony else frozenset[int]()
    schemas = {function.name: function.schema for function in functions}
    thought = _thought_limit(texts, asked.thought_budget, text)
    return Prepared(text, grammar, shown, schemas, asked.parallel and asked.choice.name is None, syntax, thought)


def render(texts: ChatTexts, asked: Conversation) -> str:
    """The prompt's text. Names of control tokens that the client wrote have a `MARK` in them."""
    if reserved := RESERVED.intersection(asked.variables):
        raise wrong("chat_template_kwargs", ", ".join(sorted(reserved)), "variables that have no field of their own")
    template, syntax = texts.template, texts.syntax
    if template is None:
        raise FieldError(asked.place, "This model has no chat template for messages.")
    variables = {**template.dates(), **asked.variables}
    effort = asked.effort
    if effort is not None:
        known = {"reasoning_effort": EFFORTS.get(effort, effort)}
        variables = known | dict.fromkeys(SWITCHES, effort not in OFF) | variables
    functions = asked.functions if asked.callable else ()
    turns, tools = list(asked.turns), [_definition(function) for function in functions]
    if tools and not syntax.tells_tools:
        turns = _with_system(turns, TOLD.format(tools="\n".join(json.dumps(tool) for tool in tools)))
        tools = []
    if not syntax.takes_system:
        turns = _without_system(turns)
    elif not syntax.takes_late_system:
        turns = _system_first(turns)
    guarded = texts.control_names.guarded
    messages, tools, variables = guarded([_message(turn, syntax) for turn in turns]), guarded(tools), guarded(variables)
    if not asked.goes_on:
        if not asked.begins:
            return template.render(messages, tools or None, **{**variables, "add_generation_prompt": False})
        text = template.render(messages, tools or None, **variables)
        if effort not in OFF or syntax.thought is None or any(variables[name] for name in SWITCHES):
            return text
        marks = syntax.thought.marks
        if opens_thought(syntax, text):
            return text + marks.end.strip()
        # A template that has no switch writes the same with thoughts: then an empty one is written here.
        switched = template.render(messages, tools or None, **{**variables, **dict.fromkeys(SWITCHES, True)}) != text
        return text if switched or not marks.start else text + marks.start.strip() + marks.end.strip()
    # The template closes the last message: the prompt ends behind what the message says.
    said = guarded(turns[-1].text)
    text = template.render(messages, tools or None, **{**variables, "add_generation_prompt": False})
    before, found, _ = text.rpartition(said.strip())
    if not found or not said.strip():
        raise FieldError(asked.place, "The chat template of this model cannot go on with an assistant's message.")
    return before + found


def _grammar(
    texts: ChatTexts, asked: Conversation, functions: list[Function], mode: Mode, prompt: str
) -> tuple[Grammar, str] | None:
    """What the answer must be, and the field that says so."""
    syntax = texts.syntax
    if asked.text_grammar is not None:
        text, place = asked.text_grammar
        if functions or asked.schema is not None:
            raise FieldError(place, f"{place} cannot be used beside functions that may be called, or a schema.")
        try:
            return text_grammar(text), place
        except DataError as error:
            raise cannot_be_used(place, error) from None
    schema, place = asked.schema if asked.schema is not None else (None, asked.tools_place)
    if schema is not None and not functions and syntax.thought is None and not syntax.harmony:
        try:
            return json_schema(schema), place
        except DataError as error:
            raise cannot_be_used(place, error) from None
    try:
        held = len(functions) < len(asked.functions)
        wanted = Wanted(functions, mode, asked.parallel and asked.choice.name is None, schema, held)
        thought = {"thinking": opens_thought(syntax, prompt), "has_thought": has_thought(syntax, prompt)}
        made = answer_grammar(syntax, wanted, texts.control_tokens, **thought)
    except DataError as error:
        raise cannot_be_used(place, error) from None
    return None if made is None else (made, place)


def _thought_limit(texts: ChatTexts, budget: int | None, prompt: str) -> ThoughtLimit | None:
    """For an answer that may begin with a thought."""
    syntax = texts.syntax
    if budget is None or budget < 0 or has_thought(syntax, prompt):
        return None
    if syntax.harmony:
        closing, analysis = texts.tokens(f"{END}{START}assistant{CHANNEL}"), texts.tokens("analysis")
        start = f"{CHANNEL}analysis{MESSAGE}"
        return ThoughtLimit(budget, False, start, END, closing, again=True, avoided=analysis[0])
    if syntax.thought is None or not syntax.thought.marks.end.strip():
        return None
    marks = syntax.thought.marks
    opened = opens_thought(syntax, prompt)
    return ThoughtLimit(budget, opened, marks.start.strip(), marks.end.strip(), texts.tokens(marks.end))


def _check_choice(asked: Conversation) -> None:
    names = [function.name for function in asked.functions]
    if len(set(names)) < len(names):
        raise FieldError(asked.tools_place, "Two tools have the same name. Give each function its own name.")
    for name in (*([] if asked.choice.name is None else [asked.choice.name]), *(asked.choice.allowed or ())):
        if name not in names:
            accepted = f"one of {', '.join(names)}" if names else "a name of a function in tools"
            raise wrong("tool_choice", json.dumps(name), accepted)
    if asked.choice.mode == "required" and not asked.callable:
        problem = "tool_choice allows none of the functions in tools." if names else "tool_choice needs tools."
        raise FieldError("tool_choice", problem)


def _definition(function: Function) -> dict[str, Any]:
    """As OpenAI describes a function, which templates expect."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    described = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _message(turn: Turn, syntax: ChatSyntax) -> dict[str, Any]:
    """What the template gets."""
    made: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.name is not None:
        made["name"] = turn.name
    if turn.role == "tool":
        made["tool_call_id"] = turn.result_of
        if not syntax.takes_results:
            made = {"role": "user", "content": f"<tool_response>\n{turn.text}\n</tool_response>"}
    if turn.thought and syntax.thought is not None:
        if syntax.thought.fields == ("content",):
            parts = [{"type": "thinking", "thinking": turn.thought}, {"type": "text", "text": turn.text}]
            made["content"] = parts
        elif not (syntax.harmony and turn.calls and turn.text):  # its template takes one of them
            names = syntax.thought.fields or ("reasoning_content", "reasoning")
            made |= dict.fromkeys(names, turn.thought)
    if turn.calls and syntax.writes_calls:
        made["tool_calls"] = [_call(call, syntax) for call in turn.calls]
    elif turn.calls:
        calls = written_calls(syntax.calls, [(call.name, json.loads(call.arguments)) for call in turn.calls])
        made["content"] = f"{turn.text}\n{calls}".lstrip()
    return made


def _call(call: Call, syntax: ChatSyntax) -> dict[str, Any]:
    arguments = call.arguments if syntax.text_arguments else json.loads(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _with_system(turns: list[Turn], text: str) -> list[Turn]:
    """A text that the model is told before all else."""
    if turns and turns[0].role == "system":
        return [Turn("system", f"{turns[0].text}\n\n{text}"), *turns[1:]]
    return [Turn("system", text), *turns]


def _system_first(turns: list[Turn]) -> list[Turn]:
    """Templates that want one message of the system, at the beginning, as Claude Code does not send it."""
    told = [turn for turn in turns if turn.role == "system"]
    if told in ([], turns[:1]):
        return turns
    others = [turn for turn in turns if turn.role != "system"]
    return [Turn("system", "\n\n".join(turn.text for turn in told)), *others]


def _without_system(turns: list[Turn]) -> list[Turn]:
    """Templates that know no system: what it says comes before the user's first words."""
    said = "\n\n".join(turn.text for turn in turns if turn.role == "system")
    others = [turn for turn in turns if turn.role != "system"]
    first = next((index for index, turn in enumerate(others) if turn.role == "user"), None)
    if not said or first is None:
        return others or turns
    others[first] = Turn("user", f"{said}\n\n{others[first].text}", name=others[first].name)
    return others


def call_of(place: str, id: str | None, name: str, arguments: object) -> Call:
    """A call of an earlier answer. Its arguments are a JSON object, or a text of one."""
    try:
        value = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise wrong(place, arguments, "a JSON object in a string")
    return Call(id or "call00000", name, json.dumps(value, ensure_ascii=False))
