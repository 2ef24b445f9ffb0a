"""/tokenize, /detokenize and /apply-template, with the fields of llama.cpp's server and of vLLM's."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from billfish.checkpoints.tokenizer.tokenizer import MARK
from billfish.serving.api.chat_completions import ChatBody, conversation_of
from billfish.serving.api.conversation import render
from billfish.serving.api.request_bodies import Body, convert, refuse, shown
from billfish.serving.api.service import Service


class TextBody(Body, kw_only=True):
    harmless: ClassVar = frozenset({"return_token_strs"})
    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] = []
    add_special: bool = False
    add_special_tokens: bool | None = None
    parse_special: bool = True
    with_pieces: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def tokenize(service: Service, body: TextBody) -> dict[str, Any]:
    """The tokens of a text, or of the prompt that messages make."""
    tokenizer = service.model.tokenizer
    if body.messages is not None:
        text, special, start = render(service, conversation_of(_chat(body))), True, True
    else:
        given = body.content if body.content is not None else body.prompt
        if given is None:
            raise refuse("content", "content is missing; expected a string, or messages instead.")
        text, special = given, body.parse_special
        # vLLM's field for prompts has the model's first token by default, llama.cpp's has none.
        start = body.add_special if body.content is not None else body.add_special_tokens is not False
    ids = service.encode("content", text, special=special, start=start)
    tokens: list[Any] = list(ids)
    if body.with_pieces:
        tokens = [
            {"id": token, "piece": _piece(tokenizer.piece_bytes(token), tokenizer.pieces[token])} for token in ids
        ]
    return {"tokens": tokens, "count": len(ids), "max_model_len": service.limits.context}


def _piece(data: bytes, name: str) -> str | list[int]:
    """A part of a character is written as its bytes."""
    try:
        return data.decode() or name
    except UnicodeDecodeError:
        return list(data)


def _chat(body: TextBody) -> ChatBody:
    names = ("messages", "tools", "chat_template_kwargs", "continue_final_message")
    given = {name: getattr(body, name) for name in names}
    given["add_generation_prompt"] = None if body.add_generation_prompt else False
    try:
        return convert(given, ChatBody)
    except msgspec.ValidationError as error:
        raise refuse("messages", f"messages cannot be used: {error}.") from None


class DetokenizeBody(Body):
    tokens: list[Any]
    model: str | None = None


def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """The text of tokens."""
    last = service.limits.vocabulary - 1
    for token in body.tokens:
        if type(token) is not int or not 0 <= token <= last:
            raise refuse("tokens", f"tokens has the token {shown(token)}; expected integers from 0 to {last}.")
    text = service.model.tokenizer.decode(body.tokens)
    return {"content": text, "prompt": text}


def count_chat(service: Service, body: ChatBody) -> dict[str, Any]:
    """The length of a chat's prompt."""
    return {"input_tokens": len(service.encode("messages", render(service, conversation_of(body))))}


def apply_template(service: Service, body: TextBody) -> dict[str, Any]:
    """The prompt that messages make."""
    if body.messages is None:
        raise refuse("messages", "messages is missing; expected a list of messages.")
    return {"prompt": render(service, conversation_of(_chat(body))).replace(MARK, "")}
