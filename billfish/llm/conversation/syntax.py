"""How one chat template writes thoughts and calls. :mod:`billfish.llm.conversation.derive` finds it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How arguments are written: as one JSON object; each as raw text between marks; or as literals, `name(key="value")`.
ArgumentStyle = Literal["json", "tagged", "literal"]


@dataclass(frozen=True)
class Marks:
    """Text before and behind something. White space around them is as the template writes it."""

    start: str = ""
    end: str = ""

    def __bool__(self) -> bool:
        return bool(self.start.strip() or self.end.strip())


@dataclass(frozen=True)
class ThoughtSyntax:
    """marks: around a thought, such as <think> and </think>. fields: of a message, from which the template writes its
    thought; "content" where it takes parts of type thinking, none where thoughts of earlier answers are left out."""

    marks: Marks
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallSyntax:
    """How calls are written.

    style: of the arguments. section: marks around all calls of an answer. call: marks around each of them.
    separator: between two calls; None where a template writes no more than one.

    With `name_key`, a call is a JSON object: `name_key`, `arguments_key` and `id_key` are its fields, and `listed` says
    that the objects are in a JSON list. Else the name comes first, then `name_end`, then the arguments. `id_mark` comes
    between them where an id does.

    key, value_end: marks around the key of an argument, and behind its value, for tagged and literal arguments.
    quote: around strings of literals.
    """

    style: ArgumentStyle
    section: Marks = Marks()
    call: Marks = Marks()
    separator: str | None = None
    name_key: str | None = None
    arguments_key: str = "arguments"
    id_key: str | None = None
    listed: bool = False
    name_end: str = ""
    key: Marks = Marks()
    value_end: str = ""
    quote: str = ""

    @property
    def trigger(self) -> str:
        """The text with which calls begin; "" where they begin as any text may."""
        return self.section.start.strip() or self.call.start.strip()


HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>")
PYTHON_TAG = "<|python_tag|>"  # which Llama 3 may write before a call
HERMES = CallSyntax("json", call=Marks("<tool_call>\n", "\n</tool_call>"), separator="\n", name_key="name")


@dataclass(frozen=True)
class ChatSyntax:
    """What a template does with conversations.

    calls: in the template's syntax, or in that of Hermes where it has none. tells_tools: the template tells the model
    which functions there are. writes_calls, takes_results: it writes calls of earlier answers, and results of calls.
    text_arguments: it wants the arguments of calls as JSON texts. takes_system: it knows messages of the system.
    takes_late_system: behind other messages, too. harmony: gpt-oss's channels, which have a reader of their own.
    """

    thought: ThoughtSyntax | None = None
    calls: CallSyntax = HERMES
    tells_tools: bool = False
    writes_calls: bool = False
    takes_results: bool = False
    text_arguments: bool = False
    takes_system: bool = True
    takes_late_system: bool = True
    harmony: bool = False

    def mark_texts(self) -> list[str]:
        """All marks: names of control tokens may be in them."""
        if self.harmony:
            return list(HARMONY)
        calls, thought = self.calls, Marks() if self.thought is None else self.thought.marks
        pairs = (thought, calls.section, calls.call, calls.key)
        texts = [text for marks in pairs for text in (marks.start, marks.end)]
        return [*texts, calls.name_end, calls.value_end, calls.quote, *(() if calls.trigger else (PYTHON_TAG,))]
