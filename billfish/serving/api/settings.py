"""How to answer: sampling, lengths, stops. One set of settings for all APIs, and OpenAI's fields for them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from billfish.llm.detokenizer import LONGEST_STOP, MOST_STOPS
from billfish.llm.sampler import Sampling
from billfish.llm.sampling_defaults import with_defaults
from billfish.serving.api.request_bodies import Body, Limits, refuse, too_long, wrong
from billfish.serving.engine.requests import Request

LARGEST_SEED = 2**63 - 1
MOST_BIASES = 1024
Whole = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
AtMost = Annotated[int, Meta(ge=-1)]  # of tokens; -1 is as many as fit
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[str, Meta(min_length=0, max_length=LONGEST_STOP)] | Annotated[list[Stop], Meta(max_length=MOST_STOPS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def stop_strings(given: str | Sequence[str]) -> tuple[str, ...]:
    """Of a field: "" is none."""
    return ((given,) if given else ()) if isinstance(given, str) else tuple(given)


@dataclass(frozen=True)
class AnswerSettings:
    """Of one request. None is the model's own default.

    max_tokens: of the answer; None or -1 is as many as fit. top_k: 0 or -1 is all. top_p: 0 is the best token alone.
    n: number of answers. logprobs: alternatives of each token; None for no probabilities. draft: whether tokens may be
    drafted.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    draft: bool = True

    def check(self, limits: Limits) -> None:
        """Raises for what depends on the model."""
        for name, least, most in (("n", 1, limits.answers), ("seed", 0, LARGEST_SEED - limits.answers)):
            value = getattr(self, name)
            if value is not None and value > most:
                raise wrong(name, value, f"an integer from {least} to {most}")
        for token in self.logit_bias:
            if not (token.isascii() and token.isdigit() and len(token) < 10 and int(token) < limits.vocabulary):
                message = f"logit_bias has the token {token!r}; expected tokens from 0 to {limits.vocabulary - 1}."
                raise refuse(f"logit_bias.{token}", message)

    def sampling(self, defaults: Mapping[str, float], limits: Limits) -> Sampling:
        """As the engine takes it. defaults: the model's."""
        given: dict[str, float | None] = {
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, sys.float_info.min),
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        chosen = with_defaults(defaults, given)
        if chosen.get("top_k", 0) >= limits.vocabulary:
            chosen["top_k"] = 0
        return Sampling(
            **chosen,  # type: ignore[arg-type]
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=secrets.randbits(48) if self.seed is None else self.seed,
        )

    def requests(
        self,
        place: str,
        prompt: list[int],
        limits: Limits,
        defaults: Mapping[str, float],
        shown: frozenset[int] = frozenset(),
    ) -> list[Request]:
        """One request for each answer to a prompt; seeds are seed, seed + 1, ... place: where the prompt came from."""
        room = limits.context - len(prompt) + 1
        if room < 1:
            raise too_long(place, f"{len(prompt)} tokens", limits)
        most = room if self.max_tokens is None or self.max_tokens < 0 else self.max_tokens
        sampling = self.sampling(defaults, limits)
        return [
            Request(
                prompt,
                max(1, min(most, room)),
                replace(sampling, seed=sampling.seed + index),
                self.stop,
                self.logprobs,
                shown=shown,
                draft=self.draft,
            )
            for index in range(self.n)
        ]


class StreamOptions(Body):
    harmless: ClassVar = frozenset({"include_obfuscation", "continuous_usage_stats"})
    include_usage: bool = False


HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "cache_prompt",
        "request_id",
        "priority",
        "keep_alive",
    }
)
# What would change an answer, and the values that do not.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "ignore_eos": (False,),
    "length_penalty": (1,),
    "lora_request": (),
    "lora": ([],),
    "mirostat": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (False, 0),
    "skip_special_tokens": (True,),
    "add_special_tokens": (True,),
}


class Options(Body):
    """The fields that chats and completions share: how to sample, when to stop, how to answer."""

    harmless: ClassVar = HARMLESS
    unsupported: ClassVar = UNSUPPORTED
    model: str | None = None
    max_tokens: AtMost | None = None
    seed: int | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: AtMost | None = None
    min_p: Share | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MOST_BIASES)] = {}
    n: Positive = 1
    stop: Stops = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    grammar: str | None = None
    guided_grammar: str | None = None
    draft: bool = True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def settings(self, max_tokens: int | None, logprobs: int | None) -> AnswerSettings:
        """The same for all APIs."""
        return AnswerSettings(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None or self.seed < 0 else self.seed,  # -1 is a random one elsewhere
            logit_bias=self.logit_bias,
            stop=stop_strings(self.stop),
            n=self.n,
            logprobs=logprobs,
            draft=self.draft,
        )
