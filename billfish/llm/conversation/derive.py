"""Finds out how a chat template writes calls and thoughts: it renders the same conversation with and without them.

Names and values of a probe are words that no template has. Where they are in the rendered text, and what is the same
around all of them, tells the syntax.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from billfish.core.errors import ModelError
from billfish.llm.chat_template import ChatTemplate
from billfish.llm.conversation.syntax import HARMONY, HERMES, CallSyntax, ChatSyntax, Marks, ThoughtSyntax

ASKED, SAID, THOUGHT = "zqasked", "zqsaid", "zqthought"
NAMES, KEYS, TEXTS = ("zqfirst", "zqsecond"), ("zqkeya", "zqkeyb"), ("zqtexta", "zqtextb")
NUMBERS = (7310, 7311)
IDS = ("zqid00001", "zqid00002")  # nine letters and digits, which Mistral's templates ask for
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
THINK_TAG = re.compile(r"(<[^<>\s/]*think[^<>\s/]*>|\[THINK\])\s*\Z", re.IGNORECASE)
USER = {"role": "user", "content": ASKED}
SYSTEM = {"role": "system", "content": "zqsystem"}
MOST_SECONDS = 20  # for all renderings; those of a model's template take milliseconds each
# Templates that tell the model which functions there are, but not how a call is written: what their models were trained
# to write, by a mark in the template's source.
UNTOLD = {
    "<|tool_list_start|>": CallSyntax(  # LFM2
        "literal",
        Marks("<|tool_call_start|>[", "]<|tool_call_end|>"),
        separator=", ",
        name_end="(",
        key=Marks("", "="),
        quote='"',
    ),
    "<|tool_call|>": CallSyntax(
        "json", Marks("<|tool_call|>"), separator="", name_key="name", listed=True
    ),  # Granite 3
}
UNTOLD["List of tools: ["] = UNTOLD["<|tool_list_start|>"]  # LFM2.5


def derive(template: ChatTemplate) -> ChatSyntax:
    """The syntax of a template. What cannot be told from it is as in :class:`ChatSyntax`."""
    probe = _Probe(template)
    offered = probe.render([USER], tools=True)
    tells_tools = offered is not None and all(name in offered for name in NAMES)
    takes_system = probe.shows([{"role": "system", "content": SAID}, USER])
    takes_late_system = takes_system and probe.shows([SYSTEM, USER, {"role": "system", "content": SAID}])
    if all(mark in template.source for mark in HARMONY[:3]):
        return ChatSyntax(
            ThoughtSyntax(Marks(), ("thinking",)),
            tells_tools=tells_tools,
            writes_calls=True,
            takes_results=True,
            takes_system=takes_system,
            takes_late_system=takes_late_system,
            harmony=True,
        )
    thought, written = _thought_syntax(probe), None
    if tells_tools:
        written = _call_syntax(probe)
        if written is None:
            probe.text_arguments = True
            written = _call_syntax(probe)
    untold = next((syntax for mark, syntax in UNTOLD.items() if mark in template.source), HERMES)
    called = {"role": "assistant", "content": "", "tool_calls": [probe.call(0, {KEYS[0]: TEXTS[0]})]}
    result = {"role": "tool", "tool_call_id": IDS[0], "name": NAMES[0], "content": SAID}
    earlier = called if written else {"role": "assistant", "content": "zqcalled"}
    return ChatSyntax(
        thought,
        written or untold,
        tells_tools=tells_tools,
        writes_calls=written is not None,
        takes_results=probe.shows([USER, earlier, result], tools=tells_tools),
        text_arguments=written is not None and probe.text_arguments,
        takes_system=takes_system,
        takes_late_system=takes_late_system,
    )


class _Probe:
    """Renders conversations, and cuts the assistant's turn out of them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template, self._until = template, time.monotonic() + MOST_SECONDS
        self.text_arguments = False  # whether arguments of calls are JSON texts

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: bool = False, **variables: Any) -> str | None:
        """The text; None where the template refuses the messages, or has taken too long."""
        if time.monotonic() > self._until:
            return None
        given = [_definition(name) for name in NAMES] if tools else None
        try:
            named = {"add_generation_prompt": False, **self._template.dates(), **variables}
            return self._template.render(messages, given, **named)
        except ModelError:
            return None

    def shows(self, messages: Sequence[Mapping[str, Any]], *, tools: bool = False) -> bool:
        """Whether the template takes such messages and writes what they say."""
        text = self.render(messages, tools=tools)
        return text is not None and SAID in text

    def call(self, index: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A call of a message."""
        given = json.dumps(arguments) if self.text_arguments else dict(arguments)
        return {"id": IDS[index], "type": "function", "function": {"name": NAMES[index], "arguments": given}}

    def turn(self, message: Mapping[str, Any], *, tools: bool = False) -> str | None:
        """What a template writes for an answer, between the user's message and the end of the turn."""
        bare = self.render([USER], tools=tools)
        whole = self.render([USER, {"role": "assistant", **message}], tools=tools)
        if bare is None or whole is None or ASKED not in bare or ASKED not in whole:
            return None
        behind, turn = bare.rpartition(ASKED)[2], whole.rpartition(ASKED)[2]
        return turn[_shared(behind, turn) :]

    def generation_prompt(self, *, tools: bool = False, **variables: Any) -> str:
        """What the template adds where an answer begins."""
        without = self.render([USER], tools=tools, **variables)
        added = self.render([USER], tools=tools, add_generation_prompt=True, **variables)
        if without is None or added is None:
            return ""
        return added[_shared(without, added) :]


def _definition(name: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": "zqwords"} for key in KEYS}
    parameters = {"type": "object", "properties": properties, "required": list(KEYS)}
    function = {"name": name, "description": "zqwords", "parameters": parameters}
    return {"type": "function", "function": function}


# ---- thoughts -------------------------------------------------------------------------------------------------------


def _thought_syntax(probe: _Probe) -> ThoughtSyntax | None:
    """From a message with a thought; else from what a template adds where thinking is off or on."""
    plain = probe.turn({"content": SAID})
    fields, marks = [], None
    for field in THOUGHT_FIELDS:
        turn = probe.turn({"content": SAID, field: THOUGHT})
        if turn is not None and THOUGHT in turn and SAID in turn.partition(THOUGHT)[2]:
            fields.append(field)
            marks = marks or _around_thought(turn, plain)
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": SAID}]
    if marks is None and (turn := probe.turn({"content": parts})) is not None:
        before, found, behind = turn.partition(THOUGHT)
        # A template that prints the list as it is writes the part's own name beside the thought.
        if found and SAID in behind and '"thinking"' not in before + behind and "'thinking'" not in before + behind:
            fields, marks = ["content"], _around_thought(turn, plain)
    if marks is not None and marks:
        return ThoughtSyntax(marks, tuple(fields))
    return _from_prompts(probe)


def _around_thought(turn: str, plain: str | None) -> Marks | None:
    """The marks beside the thought. What the turn has without a thought, too, is none of them."""
    before, _, behind = turn.partition(THOUGHT)
    between = behind.partition(SAID)[0]
    head = "" if plain is None else plain.partition(SAID)[0]
    start = before[_shared(before, head) :]
    if not start.strip() or not re.search(r"[<\[]", start):  # the turn without a thought has an empty one
        found = re.search(r"[<\[][^<>\[\]]*[>\]]\s*\Z", before)
        start = found[0] if found else start
    # The tag next to the thought is the mark: others open the turn, or the text behind the thought.
    tags = re.findall(r"<[^<>]*>[^<>]*|\[[^\[\]]*\][^\[\]]*", start)
    start = tags[-1] if tags else start
    end = re.match(r"\s*(?:<[^<>]*>|\[[^\[\]]*\])\s*", between)
    return Marks(start, end[0] if end else between)


def _from_prompts(probe: _Probe) -> ThoughtSyntax | None:
    usual = probe.generation_prompt()
    for name in ("enable_thinking", "thinking"):
        off = probe.generation_prompt(**{name: False})
        on = probe.generation_prompt(**{name: True})
        for shorter, longer in ((usual, off), (on, off)):
            added = longer[_shared(shorter, longer) :]
            if found := re.fullmatch(r"\s*(<[^<>/][^<>]*>\w*)\s*(<[^<>]*>)\s*", added):
                return ThoughtSyntax(Marks(found[1], found[2]))
    for prompt in (usual, probe.generation_prompt(thinking=True), probe.generation_prompt(enable_thinking=True)):
        if found := THINK_TAG.search(prompt):
            tag = found[1]
            return ThoughtSyntax(Marks(found[0], f"{tag[0]}/{tag[1:]}"))
    return None


# ---- calls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """One call in a turn: where it is, and what is known of it."""

    start: int
    end: int
    syntax: dict[str, Any]


def _call_syntax(probe: _Probe) -> CallSyntax | None:
    """None if the template does not write calls, or in a way that is not known."""
    texts = dict(zip(KEYS, TEXTS, strict=True))
    turn = _turn_with(probe, [probe.call(0, texts)])
    if turn is None:
        return None
    written = _json_call(turn) or _named_call(probe, turn)
    if written is None:
        return None
    head, tail = _around(probe)
    opening = turn[: written.start]
    opening = opening[len(_common_prefix(opening, head)) :]
    closing = turn[written.end :]
    closing = closing[: len(closing) - len(_common_suffix(closing, tail))]
    section, call, separator = _marks_of(probe, turn, opening, closing, written)
    if written.syntax.get("listed"):  # the marks are around the list
        section, call = Marks(section.start + call.start, call.end + section.end), Marks()
    return CallSyntax(section=section, call=call, separator=separator, **written.syntax)


def _turn_with(probe: _Probe, calls: list[dict[str, Any]]) -> str | None:
    """The turn of an answer that is nothing but calls. Some templates want no content, others an empty one."""
    for content in ("", None):
        turn = probe.turn({"content": content, "tool_calls": calls}, tools=True)
        if turn is not None and NAMES[0] in turn:
            return turn
    return None


def _around(probe: _Probe) -> tuple[str, str]:
    """What an answer's turn begins and ends with."""
    turn = probe.turn({"content": SAID}, tools=True) or ""
    head, found, tail = turn.partition(SAID)
    prompt = probe.generation_prompt(tools=True)
    return (head if found and len(head) >= len(prompt) else prompt), (tail if found else "")


def _json_call(turn: str) -> _Written | None:
    """A call that is a JSON object with the name, or a list of such objects."""
    at = turn.index(NAMES[0])
    for found in re.finditer(r"[\[{]", turn[:at]):
        try:
            value, end = json.JSONDecoder().raw_decode(turn, found.start())
        except (ValueError, RecursionError):
            continue
        if end <= at:
            continue
        listed = isinstance(value, list)
        item = value[0] if listed else value
        name_key = _key_of(item, NAMES[0])
        arguments = dict(zip(KEYS, TEXTS, strict=True))
        arguments_key = _key_of(item, arguments) or _key_of(item, json.dumps(arguments))
        if name_key and arguments_key:
            keys = {"name_key": name_key, "arguments_key": arguments_key, "id_key": _key_of(item, IDS[0])}
            return _Written(found.start(), end, {"style": "json", "listed": listed, **keys})
    return None


def _key_of(item: object, value: object) -> str | None:
    return next((key for key, each in item.items() if each == value), None) if isinstance(item, dict) else None


def _named_call(probe: _Probe, turn: str) -> _Written | None:
    """A call whose name comes before its arguments."""
    start = turn.index(NAMES[0])
    behind = start + len(NAMES[0])
    for found in re.finditer(r"\{", turn[behind:]):
        try:
            value, end = json.JSONDecoder().raw_decode(turn, behind + found.start())
        except (ValueError, RecursionError):
            continue
        if value == dict(zip(KEYS, TEXTS, strict=True)):
            name_end = turn[behind : behind + found.start()]
            return _Written(start, end, {"style": "json", "name_end": name_end.replace(IDS[0], "")})
    return _separate_arguments(probe, turn, start)


def _separate_arguments(probe: _Probe, turn: str, start: int) -> _Written | None:
    """A call whose arguments are written one by one."""
    texts = _between(turn, start, TEXTS)
    counted = _turn_with(probe, [probe.call(0, dict(zip(KEYS, NUMBERS, strict=True)))])
    numbers = None if counted is None else _between(counted, counted.index(NAMES[0]), tuple(map(str, NUMBERS)))
    if texts is None or numbers is None or counted is None:
        return None
    before, equals, between, _, behind = numbers  # name | before | key | equals | value | between | key | ... | behind
    bare_equals = texts[1]
    quote = bare_equals[len(equals) :] if bare_equals.startswith(equals) else ""
    key_start = _common_suffix(before, between)
    value_end = _common_prefix(between[: len(between) - len(key_start)], behind)
    if quote:  # literals: a comma separates them, and a bracket closes the call
        close = behind[:1] if behind[:1] in ")}" else ""
        bracket = re.match(r"[({]", before)
        if not close or bracket is None:
            return None
        end = turn.index(TEXTS[1]) + len(TEXTS[1]) + len(quote) + 1
        return _Written(
            start, end, {"style": "literal", "name_end": bracket[0], "key": Marks("", equals), "quote": quote}
        )
    name_end = before[: len(before) - len(key_start)]
    end = turn.index(TEXTS[1]) + len(TEXTS[1]) + len(value_end)
    syntax = {"style": "tagged", "name_end": name_end, "key": Marks(key_start, equals), "value_end": value_end}
    return _Written(start, end, syntax)


def _between(turn: str, start: int, values: tuple[str, ...]) -> tuple[str, ...] | None:
    """The texts between name, keys and values, and behind the last value."""
    found, at = [], start + len(NAMES[0])
    for word in (KEYS[0], values[0], KEYS[1], values[1]):
        place = turn.find(word, at)
        if place < 0:
            return None
        found.append(turn[at:place])
        at = place + len(word)
    return (*found, turn[at:])


def _tags(text: str) -> list[str]:
    """Tags, or parts of tags, and the characters between them: what is compared as a whole."""
    return re.findall(r"</?[^<>\s]*>?|\[/?[A-Z_]+\]|.", text, re.DOTALL)


def _common_prefix(a: str, b: str) -> str:
    tags = _tags(a)
    return "".join(tags[: _shared(tags, _tags(b))])


def _common_suffix(a: str, b: str) -> str:
    tags = _tags(a)[::-1]
    return "".join(tags[: _shared(tags, _tags(b)[::-1])][::-1])


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items two sequences have in common at their beginning."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _marks_of(
    probe: _Probe, turn: str, opening: str, closing: str, written: _Written
) -> tuple[Marks, Marks, str | None]:
    """Marks of the section, marks of a call, and the text between two calls."""
    texts = dict(zip(KEYS, TEXTS, strict=True))
    both = _turn_with(probe, [probe.call(0, texts), probe.call(1, texts)])
    if both is None or NAMES[1] not in both:
        return Marks(), Marks(opening, closing), None
    if written.syntax.get("listed"):
        return Marks(opening, closing), Marks(), ""
    one = turn[written.start : written.end]
    at = both.find(one)
    second = one.replace(NAMES[0], NAMES[1]).replace(IDS[0], IDS[1])
    other = both.find(second, at + len(one))
    if at < 0 or other < 0:
        return Marks(), Marks(opening, closing), None
    between = both[at + len(one) : other]
    start = _common_suffix(opening, between)
    end = _common_prefix(closing, between[: len(between) - len(start)])
    separator = between[len(end) : len(between) - len(start)]
    section = Marks(opening[: len(opening) - len(start)], closing[len(end) :])
    return section, Marks(start, end), separator
