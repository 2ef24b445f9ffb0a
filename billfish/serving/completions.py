"""/v1/completions: prompts as they are, and how they go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from billfish.serving.fields import Fields
from billfish.serving.logprobs import Written
from billfish.serving.options import read_options
from billfish.serving.refusals import Described
from billfish.serving.requests import Piece, Token
from billfish.serving.respond import Asked, Choice
from billfish.serving.service import Service

CALL = "completions"
MOST_LOGPROBS = 5  # OpenAI's limit


def read_completions(service: Service, fields: Fields) -> Asked:
    """What a client asks."""
    service.check_name(CALL, fields.text("model"))
    prompts = service.prompts(fields, "prompt")
    options = read_options(fields, service.limits, "max_tokens")
    alternatives = fields.integer("logprobs", 0, MOST_LOGPROBS)
    echo = fields.boolean("echo")
    fields.only("best_of", 1)
    fields.done()
    if echo and alternatives is not None:
        raise fields.wrong("echo", True, "false beside logprobs: there are none of the prompt")
    if len(prompts) * options.n > service.limits.answers:
        got, takes = f"{len(prompts)} prompts with {options.n} answers each", f"{service.limits.answers} answers"
        raise fields.wrong("prompt", Described(got), f"at most {takes}")
    requests, choices = [], []
    for prompt in prompts:
        new = options.requests(CALL, prompt.tokens, service.limits, alternatives)
        requests += new
        choices += [Completion(prompt.text if echo else "", service.written(alternatives)) for _ in new]
    return Asked(
        requests=requests,
        choices=choices,
        prompts=len(prompts),
        stream=options.stream,
        include_usage=options.include_usage,
        prefix="cmpl",
        kind="text_completion",
        chunk="text_completion",
    )


class Completion(Choice):
    """A text. echo: the prompt, if it comes first. written: how tokens are told, if they are."""

    def __init__(self, echo: str, written: Written | None) -> None:
        self._echo, self._texts = echo, [echo]
        self._written, self._tokens = written, list[Token]()

    def first(self) -> dict[str, Any] | None:
        return self._choice(self._echo) if self._echo else None

    def parts(self, piece: Piece) -> Iterator[dict[str, Any]]:
        self._texts.append(piece.text)
        self._tokens += piece.tokens
        if piece.text or (self._written is not None and piece.tokens):
            yield self._choice(piece.text, piece.tokens)

    def last(self) -> dict[str, Any]:
        return self._choice("")

    def whole(self) -> dict[str, Any]:
        return self._choice("".join(self._texts), self._tokens)

    def _choice(self, text: str, tokens: Sequence[Token] | None = None) -> dict[str, Any]:
        found = None if tokens is None or self._written is None else self._written.of_completion(tokens)
        return {"text": text, "logprobs": found, "finish_reason": self.finish_reason}
