"""Tokens and their probabilities, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from billfish.llm.detokenizer import Alternative, Token


class Logprobs:
    """pieces: of the vocabulary, which name the tokens that add nothing to a text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Of a chat's answer: an object for each token."""
        return {
            "content": [
                {**self._entry(token), "top_logprobs": [self._entry(each) for each in token.top]} for token in tokens
            ]
        }

    def of_completion(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Of a completion: a list for each property. The chosen token is among the best ones in any case, and a token
        without a probability, the first of a prompt, has none of either."""
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else self._best(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _best(self, token: Token) -> dict[str, float | None]:
        return {self._text(each): each.logprob for each in token.top} | {self._text(token): token.logprob}

    def _entry(self, token: Token | Alternative) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": token.logprob, "bytes": list(token.data)}

    def _text(self, token: Token | Alternative) -> str:
        """Part of a character is written as its bytes, so that different tokens stay different."""
        try:
            return token.data.decode() or self._pieces[token.id]
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
