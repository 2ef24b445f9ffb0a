"""Probabilities of tokens, in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from billfish.serving.requests import Alternative, Token


def of_chat(tokens: Sequence[Token]) -> dict[str, Any]:
    """Of a chat's answer: an object for each token."""
    return {"content": [{**_entry(token), "top_logprobs": [_entry(each) for each in token.top]} for token in tokens]}


def of_completion(tokens: Sequence[Token]) -> dict[str, Any]:
    """Of a completion: a list for each property."""
    return {
        "tokens": [_text(token) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{_text(each): each.logprob for each in token.top} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _entry(token: Token | Alternative) -> dict[str, Any]:
    return {"token": _text(token), "logprob": token.logprob, "bytes": list(token.data)}


def _text(token: Token | Alternative) -> str:
    """Part of a character is written as its bytes, so that different tokens stay different."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
