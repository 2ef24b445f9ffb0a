"""The fields that chats and completions share: how to choose tokens, when to stop, how to answer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from billfish.llm.sampler import Sampling
from billfish.serving.fields import Fields, is_number
from billfish.serving.refusals import Described, wrong
from billfish.serving.requests import Request

MOST_STOPS = 16
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Limits:
    """What requests cannot exceed. context: tokens of a prompt and its answer. answers: of one request."""

    context: int
    vocabulary: int
    answers: int


@dataclass(frozen=True)
class Options:
    """What a client wants of each answer. n: answers to each prompt. max_tokens: None for all that there is room for.
    include_usage: a stream ends with the usage."""

    n: int
    max_tokens: int | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool

    def requests(self, call: str, prompt: list[int], limits: Limits, logprobs: int | None) -> list[Request]:
        """One for each answer to a prompt; seeds are seed, seed + 1, ..."""
        room = limits.context - len(prompt) + 1
        if room < 1:
            got, takes = f"{len(prompt)} tokens", f"at most {limits.context}, the context"
            field = "messages" if call.startswith("chat") else "prompt"
            raise wrong(call, field, Described(got), takes, "context_length_exceeded")
        most = room if self.max_tokens is None else min(self.max_tokens, room)
        return [
            Request(
                prompt,
                most,
                replace(self.sampling, seed=self.sampling.seed + index),
                self.stop,
                logprobs,
            )
            for index in range(self.n)
        ]


def read_options(fields: Fields, limits: Limits, *length_fields: str) -> Options:
    """length_fields: names of the longest answer's length, of which one may be there."""
    lengths = {name: fields.integer(name, 1, limits.context) for name in length_fields}
    given = {name: length for name, length in lengths.items() if length is not None}
    if len(given) > 1:
        name, other = given
        raise fields.wrong(name, given[name], f"nothing beside {other}, which means the same")
    seed = fields.integer("seed", 0, LARGEST_SEED - limits.answers)
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_k=fields.integer("top_k", 0, limits.vocabulary) or 0,
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        min_p=fields.number("min_p", 0.0, 0, 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 10, above=True),
        logit_bias=_read_bias(fields, limits.vocabulary),
        seed=secrets.randbits(48) if seed is None else seed,
    )
    n = fields.integer("n", 1, limits.answers)
    stop = _read_stops(fields)
    stream = fields.boolean("stream")
    return Options(
        n=1 if n is None else n,
        max_tokens=next(iter(given.values()), None),
        sampling=sampling,
        stop=stop,
        stream=stream,
        include_usage=_read_stream_options(fields, stream),
    )


def _read_bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    """{"token": what is added to its score}."""
    value = fields.take("logit_bias")
    takes = f"an object of tokens from 0 to {vocabulary - 1} with numbers from -100 to 100"
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fields.wrong("logit_bias", value, takes)
    for token, bias in value.items():
        known = token.isascii() and token.isdigit() and len(token) < 10 and int(token) < vocabulary
        if not known or not is_number(bias) or not -100 <= bias <= 100:
            raise fields.wrong(f"logit_bias.{token}", bias, takes)
    return {int(token): float(bias) for token, bias in value.items()}


def _read_stops(fields: Fields) -> tuple[str, ...]:
    value: Any = fields.take("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(x, str) and x for x in stops):
        raise fields.wrong("stop", value, f"a text, or up to {MOST_STOPS} of them, none empty")
    return tuple(stops)


def _read_stream_options(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise fields.wrong("stream_options", Described("options without stream"), '"stream": true beside it')
    include = options.boolean("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    return include
