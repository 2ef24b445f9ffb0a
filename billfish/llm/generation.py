"""Prompts in, text out: a prompt is fed, then one token after another."""

from __future__ import annotations

import time
from collections.abc import Iterator

from billfish.checkpoints.tokenizer.tokenizer import Tokenizer
from billfish.core.typing import Activations
from billfish.llm.decoder_base import Decoder
from billfish.llm.kv_cache import Cache
from billfish.llm.sampler import Sampling


class Generation(Iterator[str]):
    """The pieces of an answer as they come, and afterwards what it took.

    tokens: the ids so far. finished: "" while it runs, then "end" (the model's own), "length" (max_tokens) or
    "context" (no room for more). Seconds are those of the prompt, up to the first token, and of all later ones.
    An answer may be left half-way, and its cache used for the next one. If the cache meanwhile holds another text, the
    next step feeds this one anew: slower, and the same answer.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        activations: Activations | None,
        cache: Cache | None = None,
    ) -> None:
        decoder.check_prompt(prompt)
        decoder.check_tokens("llm.generate", "logit_bias", list(sampling.logit_bias))
        self.prompt_tokens = len(prompt)
        self.tokens: list[int] = []
        self.finished = ""
        self.prompt_seconds = self.generation_seconds = 0.0
        self.reused_tokens = 0
        self._decoder, self._sampler, self._activations = decoder, sampling.sampler(prompt), activations
        self._cache, self._ends = cache or decoder.cache(), tokenizer.ends
        decoder.check_cache("llm.generate", self._cache)
        self._most = min(max_tokens, decoder.config.context - len(prompt) + 1)
        self._cut = "length" if self._most == max_tokens else "context"
        self._texts = tokenizer.stream(self._ids(prompt))

    def _ids(self, prompt: list[int]) -> Iterator[int]:
        started, text = time.perf_counter(), list(prompt)
        self._cache.reserve(min(len(prompt) + self._most, self._decoder.config.context))
        while len(self.tokens) < self._most:
            token, there = self._decoder.go_on(self._cache, text, self._sampler, self._activations)
            now = time.perf_counter()
            if self.tokens:
                self.generation_seconds += now - started
            else:
                self.prompt_seconds, self.reused_tokens = now - started, there
            started = now
            self.tokens.append(token)
            text.append(token)
            if token in self._ends:
                self.finished = "end"
                return
            yield token
            started += time.perf_counter() - now  # the time of whoever reads the text is not ours
        self.finished = self._cut

    def __next__(self) -> str:
        for text in self._texts:
            if text:  # part of a character waits for the rest
                return text
        raise StopIteration

    @property
    def prompt_rate(self) -> float:
        """Tokens of the prompt per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def generation_rate(self) -> float:
        """Tokens per second, after the first."""
        return (len(self.tokens) - 1) / self.generation_seconds if self.generation_seconds else 0.0


def generate_batch(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    activations: Activations | None,
) -> list[str]:
    """Answers to several prompts, a token of each at a time; weights are then read once for all of them."""
    for prompt in prompts:
        decoder.check_prompt(prompt, "llm.generate_batch")
    decoder.check_tokens("llm.generate_batch", "logit_bias", list(sampling.logit_bias))
    caches = [decoder.cache(len(prompt)) for prompt in prompts]
    samplers = [sampling.sampler(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    going = [i for i in range(len(prompts)) if max_tokens > 0]
    while going:
        passages = [(caches[i], answers[i][-1:] or prompts[i]) for i in going]
        chosen = decoder.choose(passages, [samplers[i] for i in going], activations)
        active, going = going, []
        for i, token in zip(active, chosen, strict=True):
            answers[i].append(token)
            full = len(prompts[i]) + len(answers[i]) > decoder.config.context
            if token not in tokenizer.ends and len(answers[i]) < max_tokens and not full:
                going.append(i)
    return [tokenizer.decode(answer) for answer in answers]
