"""One chat request for all APIs: a conversation, and how its answers are sampled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from billfish.checkpoints.tokenizer.tokenizer import MARK
from billfish.llm.conversation import chat
from billfish.llm.conversation.chat import FieldError, ToolChoice, Turn, prepare_chat
from billfish.llm.conversation.choice import Choice
from billfish.llm.conversation.events import Call
from billfish.serving.api.answering import Asked, Format
from billfish.serving.api.request_bodies import refuse
from billfish.serving.api.service import Service
from billfish.serving.api.settings import AnswerSettings

__all__ = ["Conversation", "ToolChoice", "Turn", "call_of", "prepare", "render"]


@dataclass(frozen=True)
class Conversation(chat.Conversation):
    """What a client wants."""

    settings: AnswerSettings


@contextmanager
def _refusals() -> Iterator[None]:
    """A field that cannot be used becomes 400."""
    try:
        yield
    except FieldError as error:
        raise refuse(error.field, str(error)) from None


def prepare(service: Service, asked: Conversation, format: Format) -> Asked:
    """Make the prompt and all else that an answer needs. Raises Refusal."""
    service.check_length(asked.place, asked.turns)
    asked.settings.check(service.limits)
    service.template(asked.place)
    with _refusals():
        made = prepare_chat(service.chat, _with_defaults(service, asked))
    prompt = service.encode(asked.place, made.text)
    requests = asked.settings.requests(asked.place, prompt, service.limits, service.defaults, made.shown)
    if format.telemetry is not None and format.telemetry.reads:
        requests = [replace(each, progress=True) for each in requests]
    thought = made.thought
    if thought is not None:  # a budget that cannot be used up costs nothing
        requests = [replace(each, thought=thought) if thought.budget < each.max_tokens else each for each in requests]
    format.prompt = made.text.replace(MARK, "")
    choices = [Choice(made.reader()) for _ in requests]
    return Asked(requests, choices, format, grammar=made.grammar, empty=asked.settings.max_tokens == 0)


def render(service: Service, asked: Conversation) -> str:
    """The prompt's text. Names of control tokens that the client wrote have a `MARK` in them."""
    service.template(asked.place)
    with _refusals():
        return chat.render(service.chat, _with_defaults(service, asked))


def _with_defaults(service: Service, asked: Conversation) -> Conversation:
    budget = service.budget if asked.thought_budget is None else asked.thought_budget
    return replace(asked, effort=asked.effort or service.effort, thought_budget=budget)


def call_of(place: str, id: str | None, name: str, arguments: object) -> Call:
    """A call of an earlier answer. Its arguments are a JSON object, or a text of one."""
    with _refusals():
        return chat.call_of(place, id, name, arguments)
