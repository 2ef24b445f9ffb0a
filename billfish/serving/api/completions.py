"""/v1/completions: prompts as they are, and how they go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from billfish.llm.conversation.choice import Choice
from billfish.llm.conversation.events import Event, Text
from billfish.llm.detokenizer import MOST_ALTERNATIVES, Alternative, Token
from billfish.llm.grammar import Grammar, json_schema, text_grammar
from billfish.llm.sampler import Scored
from billfish.serving.api.answering import Asked, Format, Usage, event, schema_errors
from billfish.serving.api.chat_completions import DONE, ResponseFormat, given_grammar, head_of, schema_of, usage_of
from billfish.serving.api.logprobs import Logprobs
from billfish.serving.api.request_bodies import Refusal, refuse, wrong
from billfish.serving.api.service import Prompt, Service
from billfish.serving.api.settings import UNSUPPORTED, Options, Positive


class CompletionBody(Options):
    unsupported: ClassVar = {**UNSUPPORTED, "prompt_embeds": ()}
    prompt: str | list[Any] = []
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_ALTERNATIVES)] | None = None
    echo: bool = False
    best_of: Positive | None = None
    response_format: ResponseFormat | None = None


def read_completions(service: Service, body: CompletionBody) -> Asked:
    """What a client asks. `best_of` answers are made, and the best `n` of them are given."""
    best_of = body.best_of or body.n
    if best_of < body.n:
        raise wrong("best_of", best_of, f"n or more, which is {body.n}")
    if best_of > body.n and body.stream:
        raise refuse("best_of", "best_of cannot be streamed: the best answer is known at the end.")
    choosing = best_of > body.n
    logprobs = body.logprobs if body.logprobs is not None or not choosing else 0
    settings = replace(body.settings(body.max_tokens, logprobs), n=best_of)
    settings.check(service.limits)
    prompts = service.prompts("prompt", body.prompt, most=max(1, service.limits.answers // best_of))
    if body.suffix:
        prompts = [_with_suffix(service, prompt, body.suffix) for prompt in prompts]
    requests = [
        request
        for prompt in prompts
        for request in settings.requests("prompt", prompt.tokens, service.limits, service.defaults)
    ]
    score = ([prompt.tokens for prompt in prompts], body.logprobs) if body.echo and body.logprobs is not None else None
    scores: list[list[list[Scored]]] = []
    format = CompletionFormat(service, body, prompts, scores, best_of)
    choices = [Choice() for _ in requests]
    grammar = _grammar(body)
    return Asked(
        requests, choices, format, len(prompts), grammar, empty=body.max_tokens == 0, score=score, scores=scores
    )


def _grammar(body: CompletionBody) -> tuple[Grammar, str] | None:
    found, written = schema_of(body.response_format), given_grammar(body)
    if written is not None:
        text, place = written
        if found is not None:
            raise refuse(place, f"{place} cannot be used beside a schema.")
        with schema_errors(place):
            return text_grammar(text), place
    if found is None:
        return None
    schema, place = found
    with schema_errors(place):
        return json_schema(schema), place


def _with_suffix(service: Service, prompt: Prompt, suffix: str) -> Prompt:
    """The prompt that asks for the text between two texts."""
    infill = service.infill
    if infill is None:
        raise refuse("suffix", "The tokenizer of this model has no tokens for infill, which suffix needs.")
    before, behind, middle = infill
    end = service.encode("suffix", suffix, special=False, start=False)
    tokens = [before, *prompt.tokens, behind, *end, middle]
    return Prompt(tokens, prompt.text)


class CompletionFormat(Format):
    """OpenAI's completions."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        prompts: Sequence[Prompt],
        scores: list[list[list[Scored]]],
        best_of: int,
    ) -> None:
        """scores: those of the prompts, once they are known."""
        super().__init__(body.stream)
        self._head = {**head_of("cmpl", service.name), "object": "text_completion"}
        self._body, self._prompts, self._scores, self._each = body, prompts, scores, best_of
        self._tokenizer = service.model.tokenizer
        self._logprobs = None if body.logprobs is None else Logprobs(self._tokenizer.pieces)

    def begin(self, choices: Sequence[Choice], prompt_tokens: int) -> bytes:
        if not self._body.echo:
            return b""
        return b"".join(
            self._event(index, self._prompt(index).text, self._prompt_tokens(index)) for index in range(len(choices))
        )

    def step(self, index: int, choice: Choice, events: Sequence[Event], tokens: Sequence[Token]) -> bytes:
        text = "".join(each.text for each in events if isinstance(each, Text))
        tokens = tokens if self._logprobs is not None else ()
        data = self._event(index, text, self._moved(index, tokens)) if text or tokens else b""
        if choice.finish_reason is not None:
            data += self._event(index, "", None, choice.finish_reason)
        return data

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        last = {**self._head, "choices": [], "usage": usage_of(usage)}
        return (event(last) if self._body.include_usage else b"") + DONE

    def failed(self, refusal: Refusal) -> bytes:
        return event(refusal.body())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> object:
        made = list[dict[str, Any]]()
        for start in range(0, len(choices), self._each):
            group = list(range(start, min(start + self._each, len(choices))))
            if self._each > self._body.n:
                group = sorted(group, key=lambda index: -_mean_logprob(choices[index]))[: self._body.n]
            for index in group:
                choice = choices[index]
                echoed = self._prompt(index).text if self._body.echo else ""
                tokens = [*self._prompt_tokens(index), *self._moved(index, choice.tokens)]
                made.append(self._choice(len(made), echoed + choice.message.text, tokens, choice.finish_reason))
        return {**self._head, "choices": made, "usage": usage_of(usage)}

    def _prompt(self, index: int) -> Prompt:
        return self._prompts[index // self._each]

    def _prompt_tokens(self, index: int) -> list[Token]:
        """The tokens of an echoed prompt with their probabilities. The first has none."""
        if not self._body.echo or self._logprobs is None:
            return []
        ids, at = self._prompt(index).tokens, 0
        scores = self._scores[index // self._each] if self._scores else [[] for _ in ids[1:]]
        made = list[Token]()
        for token, scored in zip(ids, [[], *scores], strict=True):
            data = self._tokenizer.piece_bytes(token)
            logprob = scored[0][1] if scored else None
            top = tuple(Alternative(one, self._tokenizer.piece_bytes(one), number) for one, number in scored[1:])
            made.append(Token(token, data, at, logprob, top))
            at += len(data.decode("utf-8", "ignore"))
        return made

    def _moved(self, index: int, tokens: Sequence[Token]) -> list[Token]:
        """Offsets count from the beginning of an echoed prompt."""
        by = len(self._prompt(index).text) if self._body.echo else 0
        return [replace(token, offset=token.offset + by) for token in tokens] if by else list(tokens)

    def _event(self, index: int, text: str, tokens: Sequence[Token] | None, reason: str | None = None) -> bytes:
        usage = {"usage": None} if self._body.include_usage else {}
        return event({**self._head, **usage, "choices": [self._choice(index, text, tokens, reason)]})

    def _choice(self, index: int, text: str, tokens: Sequence[Token] | None, reason: str | None) -> dict[str, Any]:
        found = None if tokens is None or self._logprobs is None else self._logprobs.of_completion(tokens)
        return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}


def _mean_logprob(choice: Choice) -> float:
    """By which the best answers are chosen."""
    found = [token.logprob for token in choice.tokens if token.logprob is not None]
    return sum(found) / len(found) if found else 0.0
