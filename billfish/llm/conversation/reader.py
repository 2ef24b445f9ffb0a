"""Reads an answer as it comes: tells thoughts and calls from text, in the syntax of the model's template."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from billfish.llm.conversation.events import CallArguments, CallBegin, CallEnd, Event, Text, Thought
from billfish.llm.conversation.json_call import JsonCall
from billfish.llm.conversation.literals import CLOSING, Literals, NotALiteral, typed
from billfish.llm.conversation.marks import WAIT, Functions, matched, may_begin
from billfish.llm.conversation.syntax import PYTHON_TAG, ChatSyntax

SEPARATORS = " \t\r\n,;"  # of calls
LONGEST_NAME = 256  # characters; what is longer is no name of a function


class Reader(Protocol):
    """Events of one answer. done: nothing more is wanted, though the model may go on."""

    done: bool

    def read(self, text: str) -> Iterator[Event]:
        """What can be told after this piece of the answer."""

    def finish(self) -> Iterator[Event]:
        """The rest, when the answer is over."""


class PlainReader:
    """An answer that is nothing but text."""

    done = False

    def read(self, text: str) -> Iterator[Event]:
        if text:
            yield Text(text)

    def finish(self) -> Iterator[Event]:
        return iter(())


class AnswerReader:
    """Thoughts first, then text and calls.

    functions: that may be called; without any, no call is looked for. thinking: whether the prompt has opened a
    thought. parallel: whether there may be more than one call. A call that is broken before its name is text, unless
    the answer has ended in there behind other calls.
    """

    def __init__(
        self,
        syntax: ChatSyntax,
        functions: Functions | None = None,
        *,
        thinking: bool = False,
        parallel: bool = True,
    ) -> None:
        self._thought, self._calls = syntax.thought, syntax.calls
        self._functions, self._parallel = functions or {}, parallel
        self._held, self._count, self._since = "", 0, ""
        self.done = False
        self._in_section = False
        self._tried = 0  # characters in which the end of a call was looked for
        self._json: JsonCall | None = None
        self._state: Callable[[], Iterator[Event]] = self._body
        self._started = False  # whether text or a thought has begun
        if self._thought is not None:
            self._state = self._in_thought if thinking else self._begin

    def read(self, text: str) -> Iterator[Event]:
        self._held += text
        yield from self._run()

    def finish(self) -> Iterator[Event]:
        yield from self._run()
        if self._json is not None and self._json.begun:
            yield CallEnd(self._count - 1)
        elif self._state == self._tagged_arguments:
            yield CallArguments(self._count - 1, "}" if self._some_argument else "{}")
            yield CallEnd(self._count - 1)
        elif self._count and (self._state not in (self._body, self._between) or self._begins_mark()):
            pass  # another call, which was cut before its name
        elif self._state in (self._body, self._begin):
            if self._held:
                yield Text(self._held)
        elif self._state == self._in_thought:
            if self._held.strip():
                yield Thought(self._held.rstrip())
        elif self._state == self._between:
            if self._held.strip() and not self._ends_section(self._held.strip()):
                yield Text(self._held)
        elif self._since.strip():
            yield Text(self._since)  # a call that did not come to its name
        self._held = ""

    def _run(self) -> Iterator[Event]:
        while not self.done:
            before = (self._state, len(self._held))
            yield from self._state()
            if (self._state, len(self._held)) == before:
                return

    # ---- thoughts -----------------------------------------------------------------------------------------------

    def _begin(self) -> Iterator[Event]:
        assert self._thought is not None
        end = matched(self._thought.marks.start, self._held)
        if end is None or not self._thought.marks.start.strip():
            self._state = self._body
        elif end != WAIT:
            self._held, self._state = self._held[end:], self._in_thought
        return iter(())

    def _in_thought(self) -> Iterator[Event]:
        assert self._thought is not None
        end = self._thought.marks.end.strip()
        at = may_begin(end, self._held)
        trigger = self._calls.trigger.split()[:1] if self._functions else []
        if trigger and (call := may_begin(trigger[0], self._held)) < at:  # some models call while they think
            at, end = call, "" if self._held.startswith(trigger[0], call) else end
        thought = self._held[:at].rstrip()
        if not self._started:
            thought = thought.lstrip()
        if thought:
            self._started = True
            yield Thought(thought)
        if self._held.startswith(end, at):
            self._held, self._state, self._started = self._held[at + len(end) :], self._body, False
            self._skips = True
        else:
            self._held = self._held[len(self._held[:at].rstrip()) :] if self._started else self._held.lstrip()

    _skips = False  # white space behind a thought or a call

    # ---- text ---------------------------------------------------------------------------------------------------

    def _body(self) -> Iterator[Event]:
        if self._skips:
            self._held = self._held.lstrip()
        if not self._held:
            return
        if not self._functions:
            self._skips = False
            yield Text(self._held)
            self._held = ""
        elif trigger := self._calls.trigger.split()[:1]:
            yield from self._until(trigger[0])
        else:
            yield from self._unmarked()

    def _until(self, trigger: str) -> Iterator[Event]:
        """Text up to where calls begin."""
        at = may_begin(trigger, self._held)
        text = self._held[:at].rstrip()
        if self._held.startswith(trigger, at):
            self._held, self._since, self._state = self._held[at:], "", self._open
        else:
            self._held = self._held[len(text) :]
        if text:
            self._skips, self._started = False, True
            yield Text(text)

    def _unmarked(self) -> Iterator[Event]:
        """Calls have no mark: an answer that begins with JSON may be one, and all others are text from the start."""
        start = self._held.lstrip().removeprefix(PYTHON_TAG).lstrip()
        if self._started or start[:1] not in ("", "{", "["):
            if start and PYTHON_TAG.startswith(self._held.strip()):
                return
            self._skips, self._started = False, True
            yield Text(self._held)
            self._held = ""
        elif start:
            self._held, self._since, self._state = start, "", self._open

    # ---- calls --------------------------------------------------------------------------------------------------

    def _open(self) -> Iterator[Event]:
        """At the mark of the section, or of the first call."""
        mark = self._calls.section.start
        end = matched(mark, self._held) if mark.strip() else 0
        if end == WAIT:
            return
        if end is None:
            yield from self._fail()
            return
        self._in_section = True
        self._take(end)
        self._state = self._list if self._calls.listed else self._call

    def _list(self) -> Iterator[Event]:
        """At the bracket of a list of calls, which some models leave out for one."""
        if self._held.strip():
            if self._held.lstrip()[0] == "[":
                self._take(self._held.index("[") + 1)
            self._state = self._call
        return iter(())

    def _call(self) -> Iterator[Event]:
        """At the mark of a call."""
        mark = self._calls.call.start
        end = matched(mark, self._held) if mark.strip() else 0
        if end == WAIT or not self._held.strip():
            return
        if end is None:
            yield from self._fail()
            return
        self._take(end)
        if self._calls.name_key is not None:
            self._json = JsonCall(self._calls.name_key, self._calls.arguments_key)
            self._state = self._json_call
        else:
            self._state = self._name

    def _json_call(self) -> Iterator[Event]:
        assert self._json is not None
        text, self._held = self._held, ""
        begun = self._json.begun
        left, pieces = self._json.feed(text)
        if not begun:
            self._since += text
        if not begun and self._json.begun:
            if not self._is_known(self._json.name):
                self._json = None
                yield from self._fail()
                return
            yield CallBegin(self._count, self._json.name)
            self._count += 1
        if self._json.begun and pieces:
            yield CallArguments(self._count - 1, pieces)
        if self._json.failed and not self._json.begun:
            self._json = None
            yield from self._fail()
        elif self._json.ended or self._json.failed:
            if not self._json.begun:
                self._json = None
                yield from self._fail()
                return
            self._held, self._json = left, None
            yield from self._complete()

    def _name(self) -> Iterator[Event]:
        """The name of a function, before its arguments."""
        calls = self._calls
        ends = [mark for mark in (calls.name_end, calls.key.start, calls.call.end) if mark.strip()]
        if calls.style == "json":
            ends = ["{", "[CALL_ID]", *ends]
        found = [at for at in (self._held.find(mark.strip().split()[0]) for mark in ends) if at >= 0]
        if not found:
            if len(self._held) > LONGEST_NAME:
                yield from self._fail()
            return
        name = self._held[: min(found)].strip()
        if not re.fullmatch(r"[\w.:-]+", name):
            self._take(len(self._held))
            yield from self._fail()
            return
        if calls.style == "json":
            if "{" not in self._held:
                return
            self._take(self._held.index("{"))
            self._json = JsonCall.of_arguments(name)
            self._state = self._json_call
            return
        if calls.style == "literal":
            self._literal_name, self._at_name = name, min(found)
            yield from self._literal()
            return
        behind = self._held[min(found) :]
        end = matched(calls.name_end, behind) if calls.name_end.strip() else 0
        if end == WAIT:
            return
        self._take(min(found) + (end or 0))
        self._function = name
        self._some_argument = False
        self._state = self._tagged_arguments
        yield CallBegin(self._count, name)
        self._count += 1

    def _literal(self) -> Iterator[Event]:
        calls = self._calls
        at, closing = self._at_name + len(calls.name_end.strip()), CLOSING[calls.name_end.strip()]
        new, self._tried = self._held[self._tried :], len(self._held)
        if closing not in new:
            self._state = self._name
            return
        try:
            found = Literals(self._held[at:], calls.key.end, calls.quote).arguments(closing)
        except NotALiteral:
            self._take(len(self._held))
            yield from self._fail()
            return
        if found is None:
            self._state = self._name
            return
        arguments, end = found
        self._tried = 0
        self._take(at + end)
        yield CallBegin(self._count, self._literal_name)
        yield CallArguments(self._count, json.dumps(arguments, ensure_ascii=False))
        self._count += 1
        yield from self._complete()

    def _tagged_arguments(self) -> Iterator[Event]:
        calls = self._calls
        schema = self._functions.get(self._function, {}).get("properties")
        ended = matched(calls.call.end, self._held)
        if ended == WAIT:
            return
        if ended is not None:
            self._take(ended)
            yield CallArguments(self._count - 1, "}" if self._some_argument else "{}")
            yield from self._complete()
            return
        start = matched(calls.key.start, self._held)
        if start == WAIT:
            return
        middle, last = calls.key.end, calls.value_end.strip()
        at = -1 if start is None else self._held.find(middle.strip().split()[0], start)
        found = -1 if at < 0 else self._held.find(last, at)
        if start is None:  # neither an argument nor the end: the rest is lost
            self._held = self._held[may_begin(calls.call.end.split()[0], self._held) :]
            return
        if found < 0:
            return
        key, behind = self._held[start:at].strip(), self._held[at:found]
        value = behind[matched(middle, behind) or 0 :]
        value = _trimmed(value, middle, calls.value_end)
        known = schema.get(key) if isinstance(schema, Mapping) else None
        text = json.dumps(typed(value, known), ensure_ascii=False)
        self._take(found + len(last))
        yield CallArguments(self._count - 1, f"{', ' if self._some_argument else '{'}{json.dumps(key)}: {text}")
        self._some_argument = True

    def _complete(self) -> Iterator[Event]:
        """A call is over."""
        yield CallEnd(self._count - 1)
        self._since, self._state, self._skips = "", self._between, True
        if not self._parallel:
            self.done = True

    def _between(self) -> Iterator[Event]:
        """Behind a call: its closing mark, another call, the end of the section, or text."""
        calls, held = self._calls, self._held.lstrip(SEPARATORS)
        if not held:
            return
        if calls.style != "tagged" and calls.call.end.strip():
            end = matched(calls.call.end, held)
            if end == WAIT:
                return
            if end:
                self._held = held[end:]
                return
        if calls.listed and held[0] == "]":
            self._held = held[1:]
            return
        if self._ends_section(held):
            if len(held) < len(calls.section.end.strip()):
                return
            self._held, self._in_section = held[matched(calls.section.end, held) or 0 :], False
            if not calls.section.start.strip():
                self.done = True  # what comes behind is the result of the call, which is not the model's to write
            self._state = self._body
            return
        mark = calls.call.start
        if mark.strip():
            end = matched(mark, held)
            if end == WAIT:
                return
            self._held, self._state = held, self._call if end is not None else self._body
        elif self._in_section and (held[0] == "{" or (calls.name_key is None and re.match(r"[\w.-]", held))):
            self._held, self._state = held, self._call
        else:
            self._state = self._body
        return
        yield

    def _begins_mark(self) -> bool:
        """Whether what is left may be a mark of calls that is cut, or is what stands between calls."""
        calls, held = self._calls, self._held.strip(SEPARATORS)
        marks = (calls.section.start, calls.section.end, calls.call.start, calls.call.end, calls.trigger)
        return not held or any(mark.strip() and matched(mark, held) == WAIT for mark in marks)

    def _ends_section(self, held: str) -> bool:
        end = self._calls.section.end
        return bool(end.strip()) and matched(end, held) is not None

    def _take(self, count: int) -> None:
        """Go on behind so many characters, which may turn out to be text."""
        self._since += self._held[:count]
        self._held = self._held[count:]

    def _fail(self) -> Iterator[Event]:
        """What looked like a call is text."""
        text = self._since + self._held
        self._held = self._since = ""
        self._state, self._skips, self._started = self._body, False, True
        if text:
            yield Text(text)

    def _is_known(self, name: str) -> bool:
        """Without a mark, the name tells whether JSON is a call."""
        return bool(self._calls.trigger) or name in self._functions


def _trimmed(value: str, before: str, behind: str) -> str:
    """Without the white space that belongs to the marks."""
    lead = before[len(before.rstrip()) :]
    trail = behind[: len(behind) - len(behind.lstrip())]
    return value.removeprefix(lead).removesuffix(trail)
