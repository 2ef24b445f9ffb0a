"""/v1/completions: prompts as they are, and how they go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from billfish.llm.detokenizer import Piece, Token
from billfish.serving.api.request_bodies import Options, refuse
from billfish.serving.api.responses import Asked, Choice, Written, written
from billfish.serving.api.service import Service

MOST_LOGPROBS = 5  # OpenAI's limit


class CompletionBody(Options):
    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"
    prompt: str | list[Any] = []
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: bool = False
    best_of: Literal[1] = 1


def read_completions(service: Service, body: CompletionBody) -> Asked:
    """What a client asks."""
    service.check_name(body.model)
    body.check(service.limits)
    if body.echo and body.logprobs is not None:
        raise refuse("echo", "echo and logprobs exclude each other: there are no logprobs of the prompt.")
    prompts = service.prompts("prompt", body.prompt, most=service.limits.answers // body.n)
    requests, choices = [], []
    for prompt in prompts:
        new = body.requests("prompt", prompt.tokens, service.limits, body.logprobs)
        requests += new
        choices += [Completion(prompt.text if body.echo else "", written(service, body.logprobs)) for _ in new]
    return Asked(body, requests, choices, len(prompts))


class Completion(Choice):
    """A text. echo: the prompt, if it comes first. written: how tokens are told, if they are."""

    def __init__(self, echo: str, written: Written | None) -> None:
        self._echo, self._texts = echo, [echo]
        self._written, self._tokens = written, list[Token]()

    def first(self) -> dict[str, Any] | None:
        return self._choice(self._echo) if self._echo else None

    def take(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        if piece.text or (self._written is not None and piece.tokens):
            yield self._choice(piece.text, piece.tokens)
        if piece.finished:
            self.finish_reason = piece.finished
            yield self._choice("")

    def whole(self) -> dict[str, Any]:
        return self._choice("".join(self._texts), self._tokens)

    def _choice(self, text: str, tokens: Sequence[Token] | None = None) -> dict[str, Any]:
        found = None if tokens is None or self._written is None else self._written.of_completion(tokens)
        return {"text": text, "logprobs": found, "finish_reason": self.finish_reason}
